"""Attacks on runs: they succeed against an unprotected, overfitted model, and stay below the promised epsilon with DP-SGD."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.coordinator.run_folder import RunFolder
from pipeline.runs.simulation import run_simulation
from pipeline.study.schema import Study
from privacy.accounting.accountant import DpEvent, compute_epsilon
from privacy.attacks.run import attack_run
from privacy.audit.attack_findings import AttackFindings
from privacy.ledger.ledger import Ledger
from tests.support.markers import REAL_CELLS, needs_real_cells

STUDY: dict[str, Any] = {
    "name": "attacked",
    "seed": 1,
    "data": {"name": "synthetic_smear", "cells": 400, "patients": 40, "size": 48},
    "sites": {"count": 4},
    "model": "cnn72",
    "evaluation": {"evaluate_at": "sites"},
}


def run_and_attack(tmp_path: Path, **sections: Any) -> AttackFindings:
    study = Study.model_validate(STUDY | sections)
    folder = RunFolder.create(tmp_path / "run", study)
    run_simulation(study, folder)
    report = attack_run(folder, None)
    assert (folder.path / "attacks.json").is_file()
    return report


@pytest.mark.slow
def test_attacks_succeed_on_an_unprotected_overfitted_model(tmp_path: Path) -> None:
    report = run_and_attack(
        tmp_path,
        rounds=10,
        local={"optimizer": "adam", "lr": 0.002, "batch_size": 10, "epochs": 10},
        evaluation={"evaluate_at": "sites", "splits": []},
    )
    assert report.membership.auc > 0.7
    assert report.canaries.epsilon_low > 1.5
    ssim = {case.name: case.ssim for case in report.inversion.cases}
    assert ssim["unprotected"] > 0.85
    assert ssim["unprotected"] > ssim["mean image"] + 0.05
    assert max(value for name, value in ssim.items() if "noise" in name or "sum" in name) < ssim["mean image"]


@pytest.mark.slow
def test_attack_evidence_stays_below_the_promised_epsilon(tmp_path: Path) -> None:
    report = run_and_attack(
        tmp_path, rounds=4, local={"lr": 0.5, "batch_size": 50, "epochs": 1}, privacy={"dp_sgd": {"epsilon": 8.0}}
    )
    assert report.canaries.epsilon_low < report.canaries.epsilon_promised <= 8.0
    assert report.membership.auc_low < 0.5


@needs_real_cells
@pytest.mark.parametrize("budget", [8.0, 5.0])
def test_smear_private_study_holds_its_epsilon_budget_for_every_group(tmp_path: Path, budget: float) -> None:
    """The packaged study on real cells, without warm-up: a budget of 8 is spent to the last step, 5 ends the run early."""
    from pipeline.study.toml_file import find_study, load_study

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
    assert results.stop_reason.startswith(
        "finished" if budget == 8.0 else "early: every site's privacy budget is spent"
    )
    homes = sorted((folder.path / "homes").iterdir())
    assert [home.name for home in homes] == ["batch-0", "batch-1", "batch-2", "batch-3"]
    for home in homes:
        charges = Ledger.open(home / "ledger.jsonl").list_charges()
        assert {charge.privacy_unit for charge in charges} == {"group"}
        assert charges[-1].total_epsilon <= budget
        assert charges[-1].total_epsilon == pytest.approx(
            compute_epsilon([DpEvent(c.noise_multiplier, c.sampling_rate, c.steps) for c in charges], 1e-5)
        )
        if budget == 8.0:
            assert len(charges) == 10
            assert charges[-1].total_epsilon > 7.95
