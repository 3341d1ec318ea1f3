"""`import hemofed`: fast, complete, and clear where a file of the user hides one of its packages."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import hemofed
import pipeline.strategies
from pipeline.core import errors

ROOT = Path(__file__).parents[2]


def run_python(*arguments: str, cwd: Path, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def test_import_loads_nothing_heavy(tmp_path):
    code = (
        "import sys, hemofed\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'typer', 'rich', 'importlib.metadata', 'pipeline.study'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    completed = run_python("-S", "-c", code, cwd=tmp_path)  # without the site packages, whose hooks import modules
    assert completed.returncode == 0, completed.stderr


def test_every_public_name_exists():
    assert sorted(hemofed.__all__) == dir(hemofed)
    assert all(getattr(hemofed, name) is not None for name in hemofed.__all__)
    for module in (hemofed.data, hemofed.networks, hemofed.strategies, hemofed.updates):
        assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match="'sights'"):
        _ = hemofed.sights


def test_the_whole_tree_of_errors_is_public():
    tree = {name for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, Exception)}
    assert tree == {name for name in tree if getattr(hemofed, name) is getattr(errors, name)}
    assert tree <= set(hemofed.__all__)


def test_strategies_are_those_of_the_pipeline():
    assert hemofed.strategies.__all__ == pipeline.strategies.__all__
    assert hemofed.strategies.Strategy is pipeline.strategies.Strategy


def test_version_is_that_of_the_package(tmp_path):
    assert hemofed.__version__ == version("hemofed")
    completed = run_python("-m", "hemofed", "--version", cwd=tmp_path)
    assert completed.stdout == f"{version('hemofed')}\n"


def test_a_missing_package_is_named_with_the_install_command(tmp_path):
    code = "import sys; sys.modules['torch'] = None; import hemofed\ntry: hemofed.run\nexcept hemofed.MissingExtraError as error: print(error)"
    completed = run_python("-c", code, cwd=tmp_path)
    assert "pip install 'hemofed[train]'" in completed.stdout, completed.stderr


@pytest.fixture(params=["models/__init__.py", "sites.py"])
def shadow(request, tmp_path) -> Path:
    """A file of the user with the name of a package of hemofed; what Python finds first is returned."""
    file = tmp_path / "user" / request.param
    file.parent.mkdir(parents=True)
    file.write_text("mine = True\n")
    return file


def user_folder(shadow: Path) -> Path:
    return shadow.parent if shadow.name == "sites.py" else shadow.parents[1]


def assert_names_the_shadow(stderr: str, shadow: Path) -> None:
    package = "sites" if shadow.name == "sites.py" else "models"
    assert f"{shadow} has the name of hemofed's package '{package}'" in stderr
    assert "rename it, or start Python in another folder" in stderr


def test_import_names_the_file_that_hides_a_package(shadow):
    completed = run_python("-c", "import hemofed", cwd=user_folder(shadow))
    assert completed.returncode == 1
    assert_names_the_shadow(completed.stderr, shadow)
    assert "ShadowedPackageError" in completed.stderr


def test_a_package_that_is_imported_already_is_named(shadow):
    package = "sites" if shadow.name == "sites.py" else "models"
    code = f"import sys; sys.path.insert(0, {str(user_folder(shadow))!r}); import {package}; sys.path.pop(0); import hemofed"
    completed = run_python("-c", code, cwd=ROOT)
    assert_names_the_shadow(completed.stderr, shadow)


def test_a_folder_without_init_is_named(tmp_path):
    code = "import sys, types; sys.modules['deploy'] = m = types.ModuleType('deploy'); m.__path__ = ['/mine/deploy']; import hemofed"
    completed = run_python("-c", code, cwd=tmp_path)
    assert "/mine/deploy has the name of hemofed's package 'deploy'" in completed.stderr


def test_command_names_the_file_without_a_traceback(shadow):
    completed = run_python("-m", "hemofed", "--help", cwd=user_folder(shadow))
    assert completed.returncode == 2
    assert completed.stderr.startswith("error: ")
    assert_names_the_shadow(completed.stderr, shadow)
    assert "Traceback" not in completed.stderr


def test_installed_command_ignores_the_working_directory_and_names_files_on_the_path(shadow, tmp_path):
    command = tmp_path / "bin" / "hemofed"  # as pip writes it
    command.parent.mkdir()
    command.write_text("import sys\nfrom hemofed.__main__ import main\nsys.exit(main())\n")
    folder = user_folder(shadow)
    completed = run_python(str(command), "--help", cwd=folder)
    assert completed.returncode == 0, completed.stderr
    completed = run_python(str(command), "--help", cwd=ROOT, path=Path(f"{folder}{os.pathsep}{ROOT}"))
    assert completed.returncode == 2
    assert_names_the_shadow(completed.stderr, shadow)
    assert "Traceback" not in completed.stderr


def test_shell_completion_can_be_installed(tmp_path):
    completed = run_python("-m", "hemofed", "--help", cwd=tmp_path)
    assert "--install-completion" in completed.stdout
    assert "--show-completion" in completed.stdout
