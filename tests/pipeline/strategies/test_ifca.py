"""IFCA by hand: which model a client trains, what is averaged with what, and how the models differ at the start."""

import pytest
import torch

from pipeline.core.parameters import ModelState, ParameterSpec
from pipeline.protocol.messages import Message
from pipeline.protocol.tasks import EvaluateJob, EvaluationSums, LocalWork, TrainJob, TrainResult
from pipeline.strategies.ifca import Ifca
from tests.support.federation import EMPTY, FOUR_SITES, init_state, make_context, run_round, vec


def make_evaluation(loss):
    none = torch.zeros(1)
    return EvaluationSums(torch.tensor(10.0), torch.tensor(float(loss)), none, none, none)


def make_message_with_three_models():
    vectors = {f"weights/{g}": vec(g, g) for g in range(3)} | {f"stats/{g}": EMPTY for g in range(3)}
    return Message("train", 1, vectors)


def test_ifca_client_trains_the_model_with_the_least_training_loss():
    task = Ifca(k=3).client_train(make_message_with_three_models(), {}, FOUR_SITES)
    evaluations = [next(task), task.send(make_evaluation(30)), task.send(make_evaluation(10))]
    assert all(isinstance(job, EvaluateJob) and job.split == "train" for job in evaluations)
    assert [job.weights.tolist() for job in evaluations] == [[0, 0], [1, 1], [2, 2]]
    job = task.send(make_evaluation(20))
    assert isinstance(job, TrainJob)
    assert job.initial_weights.tolist() == [1, 1]
    with pytest.raises(StopIteration) as end:
        task.send(TrainResult(vec(4, 5), EMPTY, LocalWork(5, 5, 10), 0.5, None))
    update, _ = end.value.value
    assert update.cluster == 1
    assert update.averaged["delta"].tolist() == [3, 4]


def test_ifca_averages_by_chosen_model_and_leaves_the_others_unchanged():
    strategy = Ifca(k=3)
    state = init_state(strategy, 1, 1)
    untouched = state.weights["2"].clone()
    deltas = {"a": vec(4, 0), "b": vec(0, 8), "c": vec(5, 5)}
    chosen, weights = {"a": 0, "b": 0, "c": 1}, {"a": 1, "b": 3, "c": 7}
    second = state.weights["1"] + vec(5, 5)
    state = run_round(strategy, state, deltas, clusters=chosen, weights=weights)
    assert state.weights["0"].tolist() == [1 + 1, 1 + 6]
    assert torch.equal(state.weights["1"], second)
    assert torch.equal(state.weights["2"], untouched)
    assert state.cluster_of == {"a": "0", "b": "0", "c": "1"}
    assert strategy.train_payload(state, "new").keys() == {
        f"{part}/{g}" for part in ("weights", "stats") for g in range(3)
    }


def test_ifca_models_differ_at_the_start_except_in_biases():
    spec = ParameterSpec(("one.weight", "one.bias"), ((50, 40), (50,)), ("head", "head"))
    context = make_context(spec, num_sites=4, seed=7, epochs=1)
    start = torch.cat([0.3 * torch.randn(2000, generator=torch.Generator().manual_seed(1)), torch.arange(50.0)])
    state = Ifca(k=3).init_state(ModelState(start, EMPTY), context)
    initial_weights = [state.weights[g] for g in "012"]
    assert torch.equal(initial_weights[0], start)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert float((initial_weights[one][:2000] - initial_weights[other][:2000]).abs().mean()) > 0.2
        assert torch.equal(initial_weights[one][2000:], initial_weights[other][2000:])
    assert [float(w[:2000].std()) for w in initial_weights[1:]] == pytest.approx([0.3, 0.3], rel=0.1)
    again = Ifca(k=3).init_state(ModelState(start, EMPTY), context)
    assert all(torch.equal(again.weights[g], state.weights[g]) for g in "012")


def test_ifca_warmup_trains_one_model_then_splits_it():
    """Two rounds of FedAvg, then three models around the global one."""
    strategy = Ifca(k=3, warmup_rounds=2, spread=0.5)
    spec = ParameterSpec(("one.weight", "one.bias"), ((1, 2), (1,)), ("head", "head"))
    context = make_context(spec, num_sites=4, seed=7, epochs=1)
    state = strategy.init_state(ModelState(vec(1, 5, 9), EMPTY), context)
    for round_number in (1, 2):
        payload = strategy.train_payload(state, "a")
        assert payload.keys() == {"weights/0", "stats/0"}
        assert isinstance(next(strategy.client_train(Message("train", round_number, payload), {}, context)), TrainJob)
        state = run_round(strategy, state, {"a": vec(2, 0, 0), "b": vec(0, 2, 0)}, context=context)
    assert state.weights.keys() == {"0", "1", "2"}
    torch.testing.assert_close(torch.stack(list(state.weights.values())).mean(0), vec(3, 7, 9))
    assert len({w[0].item() for w in state.weights.values()}) == 3
    assert [w[2].item() for w in state.weights.values()] == [9, 9, 9]  # biases stay
