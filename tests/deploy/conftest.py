"""A small exported run, its bundle and a runtime, shared by all tests of the edge."""

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
    "name": "edge",
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
class ExportedRun:
    run_folder: RunFolder
    export: ExportResult
    key_path: Path
    trust_store: TrustStore

    @property
    def bundle(self) -> ModelBundle:
        """Opened anew each time."""
        return ModelBundle.open(self.export.folder, self.trust_store)


@pytest.fixture(scope="session")
def exported_run(tmp_path_factory: pytest.TempPathFactory) -> ExportedRun:
    folder = tmp_path_factory.mktemp("edge")
    study = Study.model_validate(STUDY)
    run_folder = RunFolder.create(folder / "run", study)
    run_simulation(study, run_folder)
    key = keys.generate_key()
    keys.save_key(key, folder / "key.pem")
    trust_store = TrustStore(folder / "trust.json")
    trust_store.add("the lead", keys.public_hex(key))
    export = export_bundle(run_folder, "global", folder / "bundle", key, with_int8=True)
    return ExportedRun(run_folder, export, folder / "key.pem", trust_store)


@pytest.fixture(scope="session")
def bundle(exported_run: ExportedRun) -> Path:
    return exported_run.export.folder


@pytest.fixture(scope="session")
def runtime(exported_run: ExportedRun) -> BundleRuntime:
    return BundleRuntime(exported_run.bundle)


@pytest.fixture(scope="session")
def images(exported_run: ExportedRun) -> np.ndarray:
    """Rendered cells that are not in the training data, uint8 (N, 72, 72, 3)."""
    from sites.data.synthetic_smear import SyntheticSmear

    data = SyntheticSmear(cells=400, patients=20, schistocytes=0.3).load(None, 99)
    return np.ascontiguousarray(data.x.permute(0, 2, 3, 1).numpy())


@pytest.fixture
def trusted_env(exported_run: ExportedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment for this process and its children that trusts the lead's key and leaves the user's files alone."""
    variables = {
        "HEMOFED_TRUST": str(exported_run.trust_store.path),
        "HEMOFED_LOCAL_CALIBRATIONS": str(tmp_path / "local-calibrations"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return dict(os.environ)


@pytest.fixture
def hemofed(trusted_env: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Runs `hemofed` in this process, for speed, and returns its stdout; errors come as exceptions."""
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exit_code != code:
            raise (
                result.exception
                if result.exception and not isinstance(result.exception, SystemExit)
                else AssertionError(result.output)
            )
        return result.stdout

    return run_command
