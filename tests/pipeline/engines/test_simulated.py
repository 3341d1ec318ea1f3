"""The virtual clock: deadlines, stragglers, dropouts, late replies, quorum; and the client state at the sites."""

import torch

from pipeline.coordinator.run_folder import RunFolder
from pipeline.engines.simulated import ClientSpeedModel
from pipeline.protocol.messages import ClientFailure
from sites.worker.client_state import ClientStateStore

# 200 points, 20 % test, 20 % of the rest val: 128 train, 32 per site, 4 steps of 8 examples per epoch
ONE_SLOW_SITE = {"count": 4, "speed": [1.0, 4.0, 4.0, 4.0]}


def training_rounds(folder: RunFolder) -> list[dict]:
    return folder.load_rounds()[1:]


def test_deadline_fedavg_drops_late_updates_and_fedprox_keeps_partial_updates(moons, run_study):
    fedavg, _ = run_study(moons(sites=ONE_SLOW_SITE, round={"deadline": 2.0}, strategy="fedavg"), "fedavg")
    fedprox, _ = run_study(moons(sites=ONE_SLOW_SITE, round={"deadline": 2.0}, strategy="fedprox"), "fedprox")
    for record in training_rounds(fedavg):
        assert record.accepted == ("site-02", "site-03", "site-04")
        assert record.failures == {"site-01": ClientFailure("late", "2 of 4 steps by the deadline")}
    for record in training_rounds(fedprox):
        assert len(record.accepted) == 4
        assert record.work["site-01"].steps_done == 2
        assert record.work["site-02"].steps_done == 4
    assert [r.clock for r in training_rounds(fedavg)] == [2.0 * t for t in range(1, 7)]


def test_partial_updates_setting_overrides_the_strategy(moons, run_study):
    folder, _ = run_study(moons(sites=ONE_SLOW_SITE, round={"deadline": 2.0, "partial_updates": "keep"}))
    assert all(len(r.accepted) == 4 for r in training_rounds(folder))


def test_late_updates_join_a_later_round(moons, run_study):
    """Site 1 needs 4 seconds with a deadline of 2: its reply to one round arrives in the next."""
    folder, _ = run_study(
        moons(sites=ONE_SLOW_SITE, round={"deadline": 2.0, "partial_updates": "drop", "late_updates": "keep"})
    )
    is_counted = ["site-01" in r.accepted for r in training_rounds(folder)]
    assert is_counted == [False, True, False, True, False, True]
    assert all(r.work["site-01"].steps_done == 4 for r in training_rounds(folder) if "site-01" in r.accepted)


def test_round_below_the_quorum_is_void_and_keeps_the_model(moons, run_study):
    unreliable_site = {"count": 4, "dropout": [0.6, 0.0, 0.0, 0.0]}
    folder, results = run_study(moons(rounds=12, sites=unreliable_site, round={"quorum": 4}))
    records = folder.load_rounds()
    void = [r for r in records if r.void]
    assert 0 < len(void) == results.void_rounds < 12
    for r in void:
        assert "3 of 4 sites replied" in r.void
        assert r.accepted == ()
        assert r.metrics == records[r.round - 1].metrics


def test_stragglers_are_exactly_the_given_fraction():
    sites = [f"s{i}" for i in range(10)]
    speed_model = ClientSpeedModel(dict.fromkeys(sites, 2.0), dict.fromkeys(sites, 0.0), 0.5, 1)
    by_round = [speed_model.sample_speeds(sites, round_number) for round_number in range(20)]
    assert all(sum(v < 2.0 for v in speeds.values()) == 5 for speeds in by_round)
    assert len({frozenset(s for s, v in speeds.items() if v < 2.0) for speeds in by_round}) > 10
    assert speed_model.sample_speeds(sites, 3) == by_round[3]


def test_dropout_frequency(moons, run_study):
    folder, _ = run_study(moons(rounds=100, sites={"count": 4, "dropout": [0.0, 0.25, 0.5, 1.0]}))
    participation = {
        s: sum(s in r.accepted for r in training_rounds(folder)) / 100
        for s in ("site-01", "site-02", "site-03", "site-04")
    }
    assert participation["site-01"] == 1
    assert 0.6 < participation["site-02"] < 0.9
    assert 0.35 < participation["site-03"] < 0.65
    assert participation["site-04"] == 0
    assert folder.load_rounds()[1].failures["site-04"].kind == "no_reply"


def test_client_sampling_fraction(moons, run_study):
    folder, _ = run_study(moons(rounds=30, client_sampling={"fraction": 0.5}))
    asked = [r.sampled_clients for r in training_rounds(folder)]
    assert all(len(a) == 2 and list(a) == sorted(a) for a in asked)
    assert len(set(asked)) > 3


def test_client_state_is_committed_only_if_the_reply_was_accepted():
    store = ClientStateStore()
    store.set_pending({"v": torch.tensor(1.0)}, (1, 0))
    assert store.latest_state((1, 0))["v"] == 1
    assert store.resolve_pending(None) == {}  # its reply was not accepted, so it is dropped
    store.set_pending({"v": torch.tensor(2.0)}, (2, 0))
    assert store.resolve_pending((2, 0))["v"] == 2
    store.set_pending({"v": torch.tensor(3.0)}, (3, 0))
    assert store.resolve_pending((2, 0))["v"] == 2  # the pending reply was not accepted
    assert store.resolve_pending((3, 0))["v"] == 2  # a dropped state does not return


def test_site_with_a_non_finite_update_is_quarantined_and_named(moons, run_study):
    """One site's data overflow; the other sites continue without it."""
    broken = {"name": "plane", "sites": 1, "dx": 3.4e38, "dy": 3.4e38, "theta": 0.8}
    folder, _ = run_study(
        moons(
            rounds=2, feature_skew=broken, local={"lr": 1e3, "batch_size": 8}, evaluation={"evaluate_at": "coordinator"}
        )
    )
    record = folder.load_rounds()[1]
    assert record.accepted == ("site-02", "site-03", "site-04")
    assert "not finite; lower local.lr" in record.failures["site-01"].text


def test_clock_waits_until_the_deadline_for_missing_sites(moons, run_study):
    with_missing_site, _ = run_study(
        moons(rounds=3, sites={"count": 4, "dropout": [1.0, 0.0, 0.0, 0.0]}, round={"deadline": 50.0}),
        "with-missing-site",
    )
    assert [r.clock for r in training_rounds(with_missing_site)] == [50.0, 100.0, 150.0]
    without_missing_site, _ = run_study(moons(rounds=3, round={"deadline": 50.0}), "without-missing-site")
    assert [r.clock for r in training_rounds(without_missing_site)] == [4.0, 8.0, 12.0]


def test_site_without_a_finished_step_is_late(moons, run_study):
    very_slow_site = {"count": 4, "speed": [0.1, 4.0, 4.0, 4.0]}
    folder, _ = run_study(moons(rounds=2, sites=very_slow_site, round={"deadline": 2.0}, strategy="fedprox"))
    assert training_rounds(folder)[0].failures == {"site-01": ClientFailure("late", "0 of 4 steps by the deadline")}


def test_traffic_does_not_depend_on_wall_time(moons, run_study):
    runs = [run_study(moons(rounds=4), name)[1].traffic for name in ("a", "b")]
    assert runs[0] == runs[1]
