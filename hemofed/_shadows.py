"""Finds files of the user that Python imports in place of hemofed's packages, whose names are common words."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("pipeline", "sites", "models", "privacy", "deploy")
COMMAND_NAMES = ("hemofed", "-m")  # how the command is started; `-m`: while Python looks for the module to run


class ShadowedPackageError(ImportError):
    """A file or folder of the user has the name of one of hemofed's packages and comes first on Python's path."""


def refuse_shadows() -> None:
    """Raises the error; in the command, which prints expected errors without a traceback, exits."""
    text = "\n".join(_describe_shadows(Path(__file__).resolve().parents[1]))
    if not text:
        return
    if Path(sys.argv[0]).stem in COMMAND_NAMES:
        sys.stderr.write(f"error: {text}\n")
        sys.exit(2)
    raise ShadowedPackageError(text)


def _describe_shadows(root: Path) -> Iterator[str]:
    for package in PACKAGES:
        found = _locate(package)
        if found is not None and found.resolve() not in (root / package, root / package / "__init__.py"):
            yield (
                f"{found} has the name of hemofed's package {package!r}, and Python finds it first; rename it, or start "
                "Python in another folder"
            )


def _locate(package: str) -> Path | None:
    """The file or folder that `import PACKAGE` gives; None if there is none."""
    if package in sys.modules:
        module = sys.modules[package]
        origin, folders = getattr(module, "__file__", None), getattr(module, "__path__", ())
    else:
        spec = importlib.util.find_spec(package)
        origin, folders = (spec.origin, spec.submodule_search_locations or ()) if spec else (None, ())
    location = origin or next(iter(folders), None)
    return Path(location) if location else None
