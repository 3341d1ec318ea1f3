"""House rules that no linter knows."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imported(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("file", sorted((ROOT / "pipeline" / "strategies").glob("*.py")), ids=lambda f: f.stem)
def test_strategies_import_no_network_code(file):
    assert not {name for name in imported(file) if name.startswith("torch.nn")}


@pytest.mark.parametrize("room", ["hemofed", "pipeline", "sites", "models", "privacy", "deploy"])
def test_nothing_is_unpickled(room):
    for file in (ROOT / room).rglob("*.py"):
        assert not imported(file) & {"pickle", "dill", "cloudpickle", "joblib", "shelve"}, file
        assert "torch.load(" not in file.read_text(encoding="utf-8"), file


def test_only_the_engine_knows_flare():
    engine = {
        "pipeline/engines/flare.py",
        "pipeline/engines/flare_server.py",
        "pipeline/service/runtime/flare_job.py",
        "sites/worker/flare_executor.py",
    }
    knows = engine | {"pipeline/engines/flare_message_filter.py", "sites/worker/flare_hardening.py"}
    files = [
        file for room in ("pipeline", "sites", "models", "privacy", "deploy") for file in (ROOT / room).rglob("*.py")
    ]
    found = {str(f.relative_to(ROOT)) for f in files if any(name.startswith("nvflare") for name in imported(f))}
    assert found == knows
