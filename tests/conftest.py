"""Fixtures that tests of several packages share; functions and constants are in tests/support."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from models.networks.cnn import CNN28
from models.networks.mlp import MLP
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.parameters import ParameterSpec
from pipeline.runs.simulation import run_simulation
from pipeline.study.schema import Study
from sites.data.pool import ExamplePool, SplitIndices
from sites.training.augmentation import NO_AUGMENTATION, BatchAugmentation
from sites.training.base import TrainerContext, TrainingConfig
from tests.support.studies import moons_study

ROOT = Path(__file__).parents[1]
# two halves of the tests share a machine: how long an example takes to draw or to check says nothing about the code
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture
def moons() -> Callable[..., Study]:
    return moons_study


@pytest.fixture
def go(tmp_path: Path) -> Callable[..., tuple[RunFolder, dict[str, Any]]]:
    """Runs a study in a fresh folder."""

    def start(study: Study, name: str = "run") -> tuple[RunFolder, dict[str, Any]]:
        folder = RunFolder.create(tmp_path / name, study)
        return folder, run_simulation(study, folder)

    return start


@pytest.fixture
def bench() -> Callable[..., TrainerContext]:
    """A bench over random images: sizes by site, a dense net or a small CNN."""

    def make(
        sizes: Mapping[str, int] | None = None,
        net: str = "mlp",
        batch: int | None = 8,
        optimiser: Any = "sgd",
        lr: float = 0.1,
        augment: BatchAugmentation = NO_AUGMENTATION,
        balance: Any = "none",
        **recipe: float,
    ) -> TrainerContext:
        sizes = sizes or {"a": 40, "b": 40, "c": 40}
        total = sum(sizes.values())
        g = torch.Generator().manual_seed(5)
        pool = ExamplePool(
            torch.rand(total, 1, 28, 28, generator=g), torch.randint(0, 3, (total,), generator=g), torch.device("cpu")
        )
        model = MLP(hidden=(16,)) if net == "mlp" else CNN28(norm="batch" if net == "batch" else "group")
        examples, at = {}, 0
        for site, n in sizes.items():
            rows = torch.arange(at, at + n)
            examples[site] = SplitIndices(rows, rows[: n // 4], rows[n // 4 : n // 2])
            at += n
        build = lambda: model.init_network((1, 28, 28), 3, 0)  # noqa: E731
        how = TrainingConfig(
            batch,
            optimiser,
            recipe.get("momentum", 0.0),
            recipe.get("weight_decay", 0.0),
            lambda turn: lr,
            augment,
            balance,
        )
        return TrainerContext(build, ParameterSpec.from_module(build()), pool, examples, how, 3, 11)

    return make


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("the wheel is built from what git knows, and this is no git checkout")
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(source),
    ]
    subprocess.run(build, check=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Not for the whole session: playwright keeps a loop running, beside which no test can `asyncio.run`."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if not CHROMIUM.exists():
        pytest.skip("chromium is not installed: apt-get install chromium")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    os.environ.pop("HEMOFED_DATA", None)
