"""Conflicts with `[privacy]` are found when the study is read."""

from __future__ import annotations

import pytest

from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import IncompatibleStudyError
from tests.support.studies import make_dp_smear_study, make_simulation

LOCAL = {"lr": 0.1, "batch_size": 40, "epochs": 1}
CONFLICTS = {
    "BatchNorm mixes": {"model": {"name": "cnn28", "norm": "batch"}},
    "gamma measures the full local gradient": {"strategy": {"name": "fedprox", "gamma": 0.5}},
    "no privacy mechanism; use fedavg with finetune": {"strategy": "perfedavg"},
    "sends full-batch gradients": {"strategy": "fedsgd"},
    "decides by losses": {"strategy": "qfedavg"},
    "no site protects": {"strategy": "centralized", "evaluation": {"evaluate_at": "coordinator"}},
    "would weight by the site's own class counts": {"local": LOCAL | {"class_balance": "root"}},
    "samples by the site's own class counts": {"local": LOCAL | {"class_balance": "sample"}},
    "is fitted to all of a site's images": {"normalization": "site"},
    "scores of the protected patients": {"evaluation": {"evaluate_at": "sites", "splits": ["val", "train"]}},
    "'slide', but the data have 'patient'": {"privacy": {"dp_sgd": {"epsilon": 8.0, "privacy_unit": "slide"}}},
    "epsilon has 3 values for 2 sites": {"privacy": {"dp_sgd": {"epsilon": [1.0, 2.0, 3.0]}}},
    "epsilon_budget has 3 values for 2 sites": {
        "privacy": {"dp_sgd": {"epsilon": 8.0, "epsilon_budget": [1.0, 2.0, 3.0]}}
    },
    "more than one site": {"partition": {"name": "dirichlet", "alpha": 5.0}},
    "redraws every epoch": {"partition": "iid_resampled"},
    "has to see each": {"strategy": "cfl", "privacy": {"secure_aggregation": {}}},
    "has to see groups": {"strategy": "ifca", "privacy": {"secure_aggregation": {}}},
    "compares single updates": {"aggregation": "median", "privacy": {"secure_aggregation": {}}},
    "no other codec": {"compression": {"uplink": "qsgd"}, "privacy": {"secure_aggregation": {}}},
    "at least 3 a round": {"privacy": {"secure_aggregation": {}}},
    "set weighting = 'equal'": {"privacy": {"client_level_dp": {"noise_multiplier": 1.0}}},
    "also sends control": {"strategy": "scaffold", "privacy": {"client_level_dp": {"noise_multiplier": 1.0}}},
}


@pytest.mark.parametrize("words", CONFLICTS)
def test_privacy_conflicts_are_named_before_the_run(words, tmp_path):
    study = make_dp_smear_study(**CONFLICTS[words])
    with pytest.raises(IncompatibleStudyError, match=words):
        make_simulation(study, RunFolder(tmp_path), is_dry_run=True)
    assert not list(tmp_path.iterdir())


def test_data_without_privacy_units_need_privacy_unit_example(moons, tmp_path):
    study = moons(privacy={"dp_sgd": {"epsilon": 1.0}})
    with pytest.raises(IncompatibleStudyError, match="do not say whose each example is"):
        make_simulation(study, RunFolder(tmp_path), is_dry_run=True)
