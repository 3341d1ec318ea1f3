"""Attacks on whole runs: they succeed where nothing protects and a model was overfitted, and stay below the promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.coordinator.run_folder import RunFolder
from pipeline.runs.simulation import run_simulation
from pipeline.study.schema import Study
from privacy.accounting.accountant import DpEvent, compute_epsilon
from privacy.attacks.run import attack_run
from privacy.ledger.ledger import Ledger
from tests.support.markers import REAL_CELLS, needs_real_cells

WORLD: dict[str, Any] = {
    "name": "attacked",
    "seed": 1,
    "data": {"name": "synthetic_smear", "cells": 400, "patients": 40, "size": 48},
    "sites": {"count": 4},
    "model": "cnn72",
    "evaluation": {"evaluate_at": "sites"},
}


def attacked(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    study = Study.model_validate(WORLD | sections)
    folder = RunFolder.create(tmp_path / "run", study)
    run_simulation(study, folder)
    found = attack_run(folder, None)
    assert (folder.path / "attacks.json").is_file()
    return found


@pytest.mark.slow
def test_an_unprotected_overfitted_model_gives_its_patients_away(tmp_path: Path) -> None:
    found = attacked(
        tmp_path,
        rounds=10,
        local={"optimizer": "adam", "lr": 0.002, "batch_size": 10, "epochs": 10},
        evaluation={"evaluate_at": "sites", "splits": []},
    )
    assert found["membership"]["auc"] > 0.7
    assert found["canaries"]["epsilon_low"] > 1.5
    likeness = {case["name"]: case["ssim"] for case in found["inversion"]["cases"]}
    assert likeness["unprotected"] > 0.85
    assert likeness["unprotected"] > likeness["mean image"] + 0.05
    assert max(value for name, value in likeness.items() if "noise" in name or "sum" in name) < likeness["mean image"]


@pytest.mark.slow
def test_with_privacy_the_evidence_stays_below_the_promise(tmp_path: Path) -> None:
    found = attacked(
        tmp_path, rounds=4, local={"lr": 0.5, "batch_size": 50, "epochs": 1}, privacy={"dp_sgd": {"epsilon": 8.0}}
    )
    assert found["canaries"]["epsilon_low"] < found["canaries"]["epsilon_promised"] <= 8.0
    assert found["membership"]["auc_low"] < 0.5


@needs_real_cells
@pytest.mark.parametrize("budget", [8.0, 5.0])
def test_smear_private_keeps_its_promise_to_every_group(tmp_path: Path, budget: float) -> None:
    """The packaged study on real cells, with little warm-up: budget 8 is spent to the last step, 5 ends it early."""
    from pipeline.study.schema import load_study
    from pipeline.study.toml_file import find_study

    study = load_study(
        find_study("smear-private"),
        {
            "public.warmup_epochs": 0,
            "public.data.cells": 200,
            "public.data.patients": 10,
            "evaluation.every": 10,
            "privacy.dp_sgd.epsilon_budget": budget,
            "augmentation": {},
        },
    )
    folder = RunFolder.create(tmp_path / "run", study)
    results = run_simulation(study, folder, REAL_CELLS)
    assert results["stopped"].startswith("finished" if budget == 8.0 else "early: every site's privacy budget is spent")
    homes = sorted((folder.path / "homes").iterdir())
    assert [home.name for home in homes] == ["batch-0", "batch-1", "batch-2", "batch-3"]
    for home in homes:
        spent = Ledger.open(home / "ledger.jsonl").list_charges()
        assert {charge.privacy_unit for charge in spent} == {"group"}
        assert spent[-1].total_epsilon <= budget
        assert spent[-1].total_epsilon == pytest.approx(
            compute_epsilon([DpEvent(c.noise_multiplier, c.sampling_rate, c.steps) for c in spent], 1e-5)
        )
        if budget == 8.0:
            assert len(spent) == 10
            assert spent[-1].total_epsilon > 7.95
