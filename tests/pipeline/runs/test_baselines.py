"""The studies that a study is compared with."""

from __future__ import annotations

from pipeline.runs.baselines import build_baseline_studies
from tests.support.studies import make_dp_sgd_section


def test_baselines_of_a_private_study_are_trained_without_privacy(moons):
    study = moons(privacy=make_dp_sgd_section())
    baselines = build_baseline_studies(study, 4)
    assert baselines.keys() == {"local_only", "centralized", "unprotected"}
    assert all(other.privacy == type(study.privacy)() for other in baselines.values())
    assert baselines["unprotected"].strategy == study.strategy


def test_baselines_take_as_many_passes_as_the_study(moons):
    study = moons(
        local={"steps": 5, "batch_size": 8}, public={"fraction": 0.2, "warmup_epochs": 3}, evaluation={"target": 0.9}
    )
    baselines = build_baseline_studies(study, 4)
    assert set(baselines) == {"local_only", "centralized"}  # no scanner has seen points
    centralized, local_only = baselines["centralized"], baselines["local_only"]
    assert (centralized.local.steps, local_only.local.steps) == (20, 5)
    assert centralized.public == local_only.public == study.public  # all start from the same model
    assert centralized.evaluation.target is None
