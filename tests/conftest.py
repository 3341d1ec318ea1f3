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
CHROMIUM = Path("/usr/bin/chromium")

# test processes share a machine: how long an example takes to generate or to check says nothing about the code
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


@pytest.fixture
def moons() -> Callable[..., Study]:
    return moons_study


@pytest.fixture
def run_study(tmp_path: Path) -> Callable[..., tuple[RunFolder, dict[str, Any]]]:
    """Runs a study in a new folder below tmp_path and returns the run folder and the results."""

    def run(study: Study, name: str = "run") -> tuple[RunFolder, dict[str, Any]]:
        folder = RunFolder.create(tmp_path / name, study)
        return folder, run_simulation(study, folder)

    return run


@pytest.fixture
def make_trainer_context() -> Callable[..., TrainerContext]:
    """A trainer context with random images of three classes.

    sizes: site -> number of examples. net: "mlp", "cnn" (group norm) or "batch" (a CNN with batch norm).
    """

    def make(
        sizes: Mapping[str, int] | None = None,
        net: str = "mlp",
        batch_size: int | None = 8,
        optimizer: Any = "sgd",
        lr: float = 0.1,
        augmentation: BatchAugmentation = NO_AUGMENTATION,
        class_balance: Any = "none",
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> TrainerContext:
        sizes = sizes or {"a": 40, "b": 40, "c": 40}
        num_examples = sum(sizes.values())
        generator = torch.Generator().manual_seed(5)
        images = torch.rand(num_examples, 1, 28, 28, generator=generator)
        labels = torch.randint(0, 3, (num_examples,), generator=generator)
        model = MLP(hidden=(16,)) if net == "mlp" else CNN28(norm="batch" if net == "batch" else "group")
        split_indices, start = {}, 0
        for site, size in sizes.items():
            rows = torch.arange(start, start + size)
            split_indices[site] = SplitIndices(rows, rows[: size // 4], rows[size // 4 : size // 2])
            start += size

        def make_model() -> torch.nn.Module:
            return model.init_network((1, 28, 28), 3, 0)

        config = TrainingConfig(
            batch_size=batch_size,
            optimizer=optimizer,
            momentum=momentum,
            weight_decay=weight_decay,
            lr_schedule=lambda round_number: lr,
            augmentation=augmentation,
            class_balance=class_balance,
        )
        return TrainerContext(
            make_model=make_model,
            spec=ParameterSpec.from_module(make_model()),
            pool=ExamplePool(images, labels, torch.device("cpu")),
            split_indices=split_indices,
            config=config,
            num_classes=3,
            seed=11,
        )

    return make


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Small networks are slower with several threads, on a busy machine a hundred times, because threads wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hemofed's wheel, built from a copy of the files that git does not ignore."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("the wheel is built from a git checkout, and this is not one")
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    options = ["-q", "--no-deps", "--no-build-isolation", "-w", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Not for the whole session: while playwright's event loop runs, no test can call `asyncio.run`."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if not CHROMIUM.exists():
        pytest.skip("chromium is not installed: apt-get install chromium")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    os.environ.pop("HEMOFED_DATA", None)
