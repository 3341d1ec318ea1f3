"""A small run, its bundle and a runtime, once for all tests of the bedside."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from deploy.bundle.bundle import ModelBundle
from deploy.bundle.trust_store import TrustStore
from deploy.export.export import ExportResult, export_bundle
from deploy.inference.runtime import BundleRuntime
from pipeline.cli.main import app
from pipeline.coordinator.run_folder import RunFolder
from pipeline.runs.simulation import run_simulation
from pipeline.study.schema import Study
from privacy.ledger import keys

STUDY = {
    "name": "bedside",
    "description": "Rendered cells for tests",
    "rounds": 3,
    "seed": 5,
    "data": {"name": "synthetic_smear", "cells": 1500, "patients": 50, "size": 40, "schistocytes": 0.3, "val": 0.3},
    "sites": {"count": 3},
    "model": "cnn72",
    "local": {"lr": 0.002, "batch_size": 16, "epochs": 1, "optimizer": "adamw", "class_balance": "root"},
    "augmentation": {"flip": True, "rotate": 180},
    "evaluation": {"evaluate_at": "sites", "positive_class": "schistocyte", "selection_metric": "positive_auroc"},
}


@dataclass(frozen=True)
class World:
    run: RunFolder
    made: ExportResult
    key: Path
    trust: TrustStore

    @property
    def bundle(self) -> ModelBundle:
        return ModelBundle.open(self.made.folder, self.trust)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("bedside")
    study = Study.model_validate(STUDY)
    finished = RunFolder.create(folder / "run", study)
    run_simulation(study, finished)
    key = keys.generate_key()
    keys.save_key(key, folder / "key.pem")
    trust = TrustStore(folder / "trust.json")
    trust.add("the lead", keys.public_hex(key))
    return World(
        finished, export_bundle(finished, "global", folder / "bundle", key, with_int8=True), folder / "key.pem", trust
    )


@pytest.fixture(scope="session")
def bundle(world: World) -> Path:
    return world.made.folder


@pytest.fixture(scope="session")
def runtime(world: World) -> BundleRuntime:
    return BundleRuntime(world.bundle)


@pytest.fixture(scope="session")
def images(world: World) -> np.ndarray:
    """Rendered cells that the model never saw, uint8 (N, 72, 72, 3)."""
    from sites.data.synthetic_smear import SyntheticSmear

    data = SyntheticSmear(cells=400, patients=20, schistocytes=0.3).load(None, 99)
    return np.ascontiguousarray(data.x.permute(0, 2, 3, 1).numpy())


@pytest.fixture
def trusted(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, str]]:
    """This process, and those that it starts with `trusted`, believe the lead's key; nothing of the user's is touched."""
    own = {
        "HEMOFED_TRUST": str(world.trust.path),
        "HEMOFED_LABS": str(tmp_path / "labs"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    return dict(os.environ)


@pytest.fixture
def hemofed(trusted: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """In this process, for speed; errors come as exceptions."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object, code: int = 0) -> str:
        done = CliRunner().invoke(app, [str(w) for w in words])
        if done.exit_code != code:
            raise (
                done.exception
                if done.exception and not isinstance(done.exception, SystemExit)
                else AssertionError(done.output)
            )
        return done.stdout

    return call
