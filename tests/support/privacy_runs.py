"""Studies with `[privacy]`, and the charges that their simulated sites have recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.coordinator.run_folder import RunFolder
from pipeline.runs.simulation import Simulation, build_simulation
from pipeline.study.schema import Study
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import PrivacyCharge


def make_dp_sgd_section(**changes: Any) -> dict[str, Any]:
    """A `[privacy]` section with example-level DP-SGD of epsilon 4."""
    return {"dp_sgd": {"privacy_unit": "example", "epsilon": 4.0, "max_grad_norm": 0.5} | changes}


def make_secagg_studies(make_study: Callable[..., Study], **sections: Any) -> tuple[Study, Study]:
    """The same study without and with secure aggregation."""
    privacy = {"secure_aggregation": {"max_update_norm": 10.0, "max_examples": 64}}
    plain = make_study(rounds=3, **sections)
    return plain, plain.model_copy(update={"privacy": make_study(privacy=privacy).privacy})


def make_smear_study(**sections: Any) -> Study:
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


def make_simulation(study: Study, folder: RunFolder, **options: Any) -> Simulation:
    return build_simulation(study, folder, None, None, lambda record: None, **options)


def read_charges(run_path: Path, site: str) -> list[PrivacyCharge]:
    return Ledger.open(run_path / "homes" / site / "ledger.jsonl").list_charges()
