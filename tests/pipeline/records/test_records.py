"""Records: what is written is read again, and what is stale, damaged or not finite is refused or null."""

import json
import math

import pytest
from pydantic import ValidationError

from pipeline.core.errors import RunFolderError
from pipeline.protocol.messages import ClientFailure
from pipeline.protocol.tasks import LocalWork
from pipeline.records.attempt_record import next_attempt
from pipeline.records.privacy_record import PrivacyRecord
from pipeline.records.round_record import (
    RoundRecord,
    RoundSeconds,
    RoundTraffic,
    load_round_records,
    write_round_records,
)
from pipeline.records.run_control import RunControl
from pipeline.records.run_results import RunResults
from pipeline.records.scores import EvaluationScores, HeadlineScore, ModelMetrics, find_worst_site, headline_metric
from pipeline.records.site_homes import SiteHomes, SiteHomesRecord
from pipeline.strategies.base import Dendrogram
from tests.support.run_folder_factory import make_metrics, make_record, make_results, make_round_record

FULL_ROUND = RoundRecord(
    round=3,
    lr=0.05,
    sampled_clients=("a", "b", "c"),
    accepted=("b", "c"),
    failures={"a": ClientFailure("late", "12 of 50 steps")},
    work={"b": LocalWork(steps_requested=50, steps_done=40, num_examples=320, seconds=2.5, eval_steps=4)},
    train_loss={"b": 0.75, "c": math.inf},
    bytes=RoundTraffic(up=11, down=22, evaluate_up=33, evaluate_down=44),
    seconds=RoundSeconds(train=1.5, evaluate=0.25, save=0.125),
    clock=math.nan,
    void=None,
    clusters={"b": "0", "c": "1"},
    dendrogram=Dendrogram(("b", "c"), ((0, 1, 0.5, 2),)),
    epsilon={"b": 2.25},
    attempt=2,
    evaluation_failures={"c": ClientFailure("failed", "no space")},
    metrics={"val": EvaluationScores(pooled=ModelMetrics(n=7, accuracy=0.625, loss=math.nan))},
)


def test_a_round_is_read_as_it_was_written(tmp_path):
    write_round_records(tmp_path, [FULL_ROUND])
    (record,) = load_round_records(tmp_path)
    assert record == FULL_ROUND
    assert (record.bytes.training_total, record.seconds.total) == (33, 1.875)
    assert (record.failures["a"].kind, record.work["b"].eval_steps) == ("late", 4)


def test_a_number_that_is_not_finite_is_null():
    content = json.loads(FULL_ROUND.to_line(), parse_constant=pytest.fail)
    assert (content["train_loss"], content["clock"]) == ({"b": 0.75, "c": None}, None)
    assert content["metrics"]["val"]["pooled"] == {"n": 7, "accuracy": 0.625, "loss": None}


def test_fields_of_other_studies_are_left_out_of_the_file():
    assert not {"clusters", "dendrogram", "epsilon", "attempt"} & make_record(1, {"a": 0.5}).to_dict().keys()
    assert {"clusters", "dendrogram", "epsilon", "attempt"} <= FULL_ROUND.to_dict().keys()


@pytest.mark.parametrize("change", [{"missed": {}}, {"failures": {"a": "late"}}, {"bytes": {"up": 1}}, {"lr": "fast"}])
def test_a_stale_or_wrong_key_of_a_round_is_refused(tmp_path, change):
    lines = [json.dumps(make_round_record(n, {"a": 0.5}) | (change if n == 1 else {})) for n in range(2)]
    (tmp_path / "rounds.jsonl").write_text("\n".join(lines))
    with pytest.raises(RunFolderError, match=rf"rounds\.jsonl, line 2: {next(iter(change))}"):
        load_round_records(tmp_path)


def test_a_truncated_last_line_is_ignored(tmp_path):
    write_round_records(tmp_path, [make_record(0), make_record(1)])
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write(make_record(2).to_line()[:-9])
    assert [record.round for record in load_round_records(tmp_path)] == [0, 1]


def test_results_are_read_as_they_were_written(tmp_path):
    results = make_results(void_rounds=5, seconds=12.5)
    results.write(tmp_path)
    assert RunResults.read(tmp_path) == results
    assert json.loads((tmp_path / "results.json").read_text()) == results.to_dict()
    with pytest.raises(ValidationError, match="frozen"):
        results.rounds = 7


def test_a_missing_and_a_damaged_file(tmp_path):
    assert PrivacyRecord.read_if_present(tmp_path) is None
    with pytest.raises(RunFolderError, match=r"has no privacy\.json; finish it"):
        PrivacyRecord.read(tmp_path)
    (tmp_path / "privacy.json").write_text('{"dp_sgd": {}, "promise": 3}')
    with pytest.raises(RunFolderError, match=r"privacy\.json is damaged \(promise: "):
        PrivacyRecord.read_if_present(tmp_path)
    assert PrivacyRecord.read_if_valid(tmp_path) is None
    (tmp_path / "control.json").write_text('{"want": "stop"}')
    assert RunControl.read_if_valid(tmp_path) is None


def test_an_attempt_at_the_same_round_has_the_next_number(tmp_path):
    assert [next_attempt(tmp_path, round_number) for round_number in (4, 4, 4, 5, 4)] == [1, 2, 3, 1, 1]


def test_site_homes_are_in_the_run_or_in_the_folder_that_it_names(tmp_path):
    own = SiteHomes.locate(tmp_path / "run")
    assert own.home_path("st/anne") == tmp_path / "run" / "homes" / "st%2Fanne"
    assert (own.coordinator_folder, own.is_shared) == (tmp_path / "run" / "coordinator", False)
    SiteHomesRecord(folder=str(tmp_path / "shared")).write(tmp_path / "run")
    shared = SiteHomes.locate(tmp_path / "run")
    assert shared.home_path("a") == tmp_path / "shared" / "a"
    assert (shared.coordinator_folder, shared.is_shared) == (tmp_path / "shared" / ".coordinator", True)
    assert SiteHomes.locate(tmp_path / "run", tmp_path / "other").folder == tmp_path / "other"


def test_the_headline_is_the_positive_class_even_where_it_is_undefined():
    assert (headline_metric("lower"), headline_metric(None), headline_metric(None, "macro_f1")) == (
        "positive_auroc",
        "accuracy",
        "macro_f1",
    )
    undefined = ModelMetrics(n=5, accuracy=0.75, positive_auroc=None)
    assert undefined.headline_metric == ModelMetrics.model_validate(undefined.to_dict()).headline_metric
    assert undefined.headline_metric == "positive_auroc"
    assert ModelMetrics(n=5, accuracy=0.75).headline_metric == "accuracy"


def test_the_headline_is_of_validation_data_and_of_the_coordinator_first():
    test = EvaluationScores(pooled=ModelMetrics(n=5, accuracy=0.25))
    val = EvaluationScores(pooled=ModelMetrics(n=6, accuracy=0.5), coordinator=ModelMetrics(n=7, accuracy=0.75))
    headline = HeadlineScore.select({"test": test, "val": val})
    assert (headline.split, headline.metric, headline.value) == ("val", "accuracy", 0.75)
    assert HeadlineScore.select({"test": test}).value == 0.25
    assert HeadlineScore.select({"val": EvaluationScores()}) is None
    assert HeadlineScore.select({}) is None


def test_the_worst_site_of_several():
    sites = {site: ModelMetrics.model_validate(make_metrics(value)) for site, value in (("a", 0.7), ("b", 0.4))}
    undefined = {"c": ModelMetrics(n=0)}
    assert find_worst_site(sites | undefined, "accuracy") == "b"
    assert find_worst_site({"a": sites["a"]}, "accuracy") is None
    assert find_worst_site(undefined, "accuracy") is None
