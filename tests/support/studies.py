"""Small studies with and without privacy, their simulations, and readers of what their runs write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.tensor_io import load_tensors
from pipeline.runs.simulation import Simulation, build_simulation
from pipeline.study.schema import Study
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import PrivacyCharge


def moons_study(**sections: Any) -> Study:
    """Two moons, four sites, six rounds; `sections` replace those of the study file."""
    raw: dict[str, Any] = {
        "name": "test",
        "rounds": 6,
        "seed": 3,
        "data": {"name": "moons", "points": 200, "val": 0.2},
        "sites": {"count": 4},
        "model": "moons_net",
        "local": {"lr": 0.1, "batch_size": 8, "epochs": 1},
        "evaluation": {"evaluate_at": "sites"},
    }
    return Study.model_validate(raw | sections)


def make_dp_smear_study(**sections: Any) -> Study:
    """One round of patient-level DP-SGD at two sites with rendered cells."""
    raw: dict[str, Any] = {
        "name": "cells",
        "rounds": 1,
        "data": {"name": "synthetic_smear", "cells": 240, "patients": 24, "size": 32},
        "sites": {"count": 2},
        "model": {"name": "mlp", "hidden": [4]},
        "local": {"lr": 0.1, "batch_size": 40, "epochs": 1},
        "evaluation": {"evaluate_at": "sites"},
        "privacy": {"dp_sgd": {"epsilon": 8.0}},
    }
    return Study.model_validate(raw | sections)


def make_dp_sgd_section(**changes: Any) -> dict[str, Any]:
    """A `[privacy]` section with example-level DP-SGD of epsilon 4."""
    return {"dp_sgd": {"privacy_unit": "example", "epsilon": 4.0, "max_grad_norm": 0.5} | changes}


def make_secagg_studies(make_study: Callable[..., Study], **sections: Any) -> tuple[Study, Study]:
    """The same study without and with secure aggregation."""
    privacy = {"secure_aggregation": {"max_update_norm": 10.0, "max_examples": 64}}
    plain = make_study(rounds=3, **sections)
    return plain, plain.model_copy(update={"privacy": make_study(privacy=privacy).privacy})


def make_simulation(study: Study, folder: RunFolder, **options: Any) -> Simulation:
    return build_simulation(study, folder, None, None, lambda record: None, **options)


def final_weights(folder: RunFolder) -> torch.Tensor:
    """(P,) of the run's global model."""
    return load_tensors(folder.path / "models" / "global.safetensors")[1]["weights"]


def read_charges(run_path: Path, site: str) -> list[PrivacyCharge]:
    """The charges in a simulated site's ledger."""
    return Ledger.open(run_path / "homes" / site / "ledger.jsonl").list_charges()
