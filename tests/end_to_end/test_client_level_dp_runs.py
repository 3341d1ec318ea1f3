"""Runs with client-level DP: clipping and noise of the right size at the coordinator."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.aggregation.client_level_dp import ClientLevelDpMean
from pipeline.protocol.messages import Aggregate, ClientUpdate, Reply


def test_client_level_dp_clips_updates_and_adds_noise_of_the_right_size(moons, run_study):
    """Four sites, clipping bound 1, noise 0.5: the mean's standard deviation is 0.5 / 4 in every coordinate and round."""
    folder, _ = run_study(
        moons(
            rounds=1,
            weighting="equal",
            privacy={"client_level_dp": {"noise_multiplier": 0.5, "max_update_norm": 1.0}},
            local={"lr": 1e-9},
        )
    )
    assert folder.load_rounds()[1].attempt == 0
    rule = ClientLevelDpMean(max_update_norm=1.0, noise_multiplier=0.5, sensitivity=1.0, num_sampled_clients=4)
    replies = [
        Reply(s, "train", 1, 0, ClientUpdate(averaged={"delta": torch.full((20_000,), value)}), 1.0)
        for s, value in (("a", 100.0), ("b", 0.0), ("c", 0.0))
    ]
    mean = rule.aggregate(replies).mean("delta")
    assert float(mean.std()) == pytest.approx(0.5 / 4, rel=0.03)
    assert float(mean.mean()) == pytest.approx(1 / math.sqrt(20_000) / 4, abs=0.003)  # a is clipped to norm 1
    assert isinstance(rule.finalize_sum(Aggregate.from_sums({"delta": torch.zeros(5)}, 3.0, {}, ["a"])), Aggregate)
