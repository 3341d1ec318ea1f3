"""Runs with secure aggregation: the decrypted sum is the plain sum, also with dropouts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.aggregation.requests import RoundRequest
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import MessageError, QuorumNotReachedError
from pipeline.protocol.messages import Declined, Message, RoundPolicy, SiteId
from pipeline.protocol.serialization import deserialize_message, deserialize_reply, serialize_reply
from pipeline.runs.simulation import Simulation
from tests.support.federation import make_round_request
from tests.support.studies import (
    final_weights,
    make_dp_sgd_section,
    make_secagg_studies,
    make_simulation,
    read_charges,
)


@pytest.mark.parametrize(
    "strategy", ["fedavg", {"name": "fedprox", "mu": 0.5}, "scaffold", "fednova", "qfedavg", "fedopt", "ditto"]
)
def test_secagg_gives_the_plain_sum(moons, run_study, strategy):
    plain_study, secagg_study = make_secagg_studies(moons, strategy=strategy, sites={"count": 5})
    (plain, _), (masked, results) = run_study(plain_study, "plain"), run_study(secagg_study, "masked")
    torch.testing.assert_close(final_weights(plain), final_weights(masked), rtol=1e-4, atol=1e-5)
    for record in masked.load_rounds()[1:]:
        assert len(record.accepted) == 5
        assert record.work == record.train_loss == {}  # the coordinator sees no single site's
    assert results.traffic.up > 0


class DroppingEngine:
    """Wraps an engine; `dropouts_by_task`: sites that do not get the messages of a task."""

    def __init__(self, engine: Any, dropouts_by_task: Mapping[str, set[SiteId]]) -> None:
        self.engine, self.dropouts_by_task = engine, dropouts_by_task

    def exchange(
        self, encoded_messages: Mapping[SiteId, bytes], round_policy: RoundPolicy
    ) -> Iterator[tuple[SiteId, bytes]]:
        tasks = {site: deserialize_message(encoded).task for site, encoded in encoded_messages.items()}
        delivered = {s: m for s, m in encoded_messages.items() if s not in self.dropouts_by_task.get(tasks[s], set())}
        yield from self.engine.exchange(delivered, round_policy)


def aggregate_once(
    simulation: Simulation, dropouts_by_task: Mapping[str, set[SiteId]], attempt: int = 0, round_number: int = 1
) -> tuple[Any, RoundRequest]:
    round_loop = simulation.round_loop
    request = make_round_request(
        DroppingEngine(simulation.engine, dropouts_by_task),
        run_jobs=round_loop.run_jobs,
        round_number=round_number,
        attempt=attempt,
        round_policy=RoundPolicy(quorum=0),
        visibility="totals",
        compression=round_loop.compression,
        aggregation_rule=round_loop.study.aggregation,
        secure_aggregation=round_loop.secure_aggregation,
    )
    strategy, trainer_context = round_loop.study.strategy, simulation.trainer_context
    state = strategy.init_state(trainer_context.spec.read_state(trainer_context.make_model()), round_loop.context)
    return request.aggregate({site: strategy.train_payload(state, site) for site in round_loop.sites}), request


class RecordingEngine(DroppingEngine):
    """Declines to unmask for one site, and keeps the replies to the training messages."""

    def __init__(self, engine: Any, declining_site: SiteId) -> None:
        super().__init__(engine, {})
        self.declining_site = declining_site
        self.trained: list[Any] = []

    def exchange(
        self, encoded_messages: Mapping[SiteId, bytes], round_policy: RoundPolicy
    ) -> Iterator[tuple[SiteId, bytes]]:
        for site, encoded_reply in super().exchange(encoded_messages, round_policy):
            reply = deserialize_reply(site, encoded_reply)
            if reply.task == "train":
                self.trained.append(reply)
            if (reply.task, site) == ("unmask", self.declining_site):
                declined = Declined(site, "unmask", reply.round, "secure_aggregation", "will not")
                yield site, serialize_reply(declined)
            else:
                yield site, encoded_reply


def test_secagg_replies_show_neither_weight_nor_work_and_a_refusal_to_unmask_is_no_failure(moons, tmp_path):
    _, study = make_secagg_studies(moons, sites={"count": 5}, partition={"name": "quantity", "ratio": 3})
    simulation = make_simulation(study, RunFolder.create(tmp_path / "run", study))
    engine = RecordingEngine(simulation.engine, "site-02")
    simulation = replace(simulation, engine=engine)  # type: ignore[arg-type]
    aggregate, request = aggregate_once(simulation, {})
    assert aggregate.clients == list(simulation.round_loop.sites)
    assert request.log.failures == {}
    assert [(reply.weight, reply.update.work) for reply in engine.trained] == [(1.0, None)] * 5


@pytest.mark.parametrize("task", ["advertise", "share", "train", "unmask"])
def test_secagg_tolerates_a_dropout_in_every_step(moons, tmp_path, task):
    """A site that drops out before it sends its update is not in the sum; afterwards it is."""
    _, study = make_secagg_studies(moons, sites={"count": 7})
    simulation = make_simulation(study, RunFolder.create(tmp_path / "run", study))
    dropouts = {"site-03"}
    aggregate, request = aggregate_once(simulation, {task: dropouts})
    included = [s for s in simulation.round_loop.sites if s not in dropouts or task == "unmask"]
    assert aggregate.clients == included
    assert aggregate.work_by_client == {}
    plain = study.model_copy(update={"privacy": type(study.privacy)()})
    plain_simulation = make_simulation(plain, RunFolder.create(tmp_path / "plain", plain))
    expected, _ = aggregate_once(plain_simulation, {} if task == "unmask" else {"train": dropouts})
    torch.testing.assert_close(aggregate.mean("delta"), expected.mean("delta"), rtol=1e-4, atol=1e-6)
    if task == "unmask":
        assert request.log.failures == {}
    else:
        assert {site: failure.kind for site, failure in request.log.failures.items()} == {"site-03": "no_reply"}


def test_secagg_with_too_many_dropouts_voids_the_round(moons, tmp_path):
    _, study = make_secagg_studies(moons, sites={"count": 6})
    simulation = make_simulation(study, RunFolder.create(tmp_path / "run", study))
    with pytest.raises(QuorumNotReachedError):
        aggregate_once(simulation, {"train": {"site-01", "site-02"}})


def test_secagg_refuses_a_second_attempt_of_an_unmasked_round(moons, tmp_path):
    """With other survivors it would reveal the difference of the two sums."""
    _, study = make_secagg_studies(moons, sites={"count": 4})
    simulation = make_simulation(study, RunFolder.create(tmp_path / "run", study))
    aggregate_once(simulation, {})
    with pytest.raises(QuorumNotReachedError, match="advertised"):
        aggregate_once(simulation, {"train": {"site-01"}}, attempt=1)
    aggregate_once(simulation, {}, round_number=2)


def test_secagg_step_belongs_to_its_round_attempt(moons, tmp_path):
    _, study = make_secagg_studies(moons, sites={"count": 4})
    simulation = make_simulation(study, RunFolder.create(tmp_path / "run", study))
    client = simulation.engine.privacy_by_site["site-01"].update_masker
    client.handle_message(Message("advertise", 5, {}))
    with pytest.raises(MessageError, match=r"does not take part in .* 4, attempt 0"):
        client._current_secagg_client(Message("unmask", 4, {}))
    restarted = make_simulation(study, RunFolder.open(tmp_path / "run")).engine.privacy_by_site["site-01"].update_masker
    answer = restarted.handle_message(Message("unmask", 5, {}))
    assert answer.kind == "secure_aggregation"  # type: ignore[union-attr]
    assert "restarted and counts as a dropout" in answer.text  # type: ignore[union-attr]


def test_secagg_run_tolerates_dropouts_and_deadlines(moons, run_study):
    _, study = make_secagg_studies(
        moons,
        sites={"count": 6, "speed": [0.5, 4, 4, 4, 4, 4], "dropout": [0, 0.5, 0, 0, 0, 0]},
        round={"deadline": 2.0},
        strategy="fedavg",
    )
    folder, _ = run_study(study)
    for record in folder.load_rounds()[1:]:
        assert record.void or record.failures["site-01"].kind == "late"


def test_dp_sgd_client_level_dp_and_secagg_together(moons, run_study):
    folder, results = run_study(
        moons(
            rounds=3,
            weighting="equal",
            privacy=make_dp_sgd_section()
            | {"client_level_dp": {"epsilon": 200.0, "max_update_norm": 1.0}, "secure_aggregation": {}},
        )
    )
    record = json.loads((folder.path / "privacy.json").read_text())
    assert record["client_level_dp"]["epsilon"] <= 200
    assert record["client_level_dp"]["sensitivity"] == pytest.approx(1.0, rel=1e-3)
    assert record["secure_aggregation"]["threshold"] == 3
    assert results.stop_reason == "finished"
    assert read_charges(folder.path, "site-01")[-1].total_epsilon <= 4.0
