"""What leaves a site: the list agrees with the code that sends, and with the table in docs/officer.md."""

import re
from pathlib import Path

import pytest

from pipeline.core.registry import registered_components
from pipeline.strategies.base import Strategy
from pipeline.strategies.dry_run import dry_run
from pipeline.study.disclosures import STATUS_TEXTS, list_disclosures
from pipeline.study.run_spec import RunSpec
from privacy.ledger.countersigner import LedgerCountersigner
from sites.agent.status import AgentStatus
from sites.worker.run_worker import open_run_worker
from tests.support.audit_factory import make_tiny_study
from tests.support.hospital import SETTINGS, SITE, Hospital

ROOT = Path(__file__).parents[3]
EVALUATION = {"evaluate_at": "sites", "splits": ["val", "train"]}
DP_SGD = {"dp_sgd": {"noise_multiplier": 1.4}}
PRIVACY_BY_COLUMN = {
    "without `[privacy]`": {},
    "with `dp_sgd`": DP_SGD,
    "with `secure_aggregation`": {"secure_aggregation": {}},
}
PROTECTION_IN_DOCS = {"unprotected": "no", "dp": "noise", "sum": "only the sum", "nothing": "needs none"}


def disclosures_by_content(**sections):
    """Of studies that together have every kind of disclosure."""
    studies = [
        make_tiny_study(strategy=name, evaluation=EVALUATION, **sections) for name in ("fedavg", "ifca", "ditto")
    ]
    return {disclosure.content: disclosure for study in studies for disclosure in list_disclosures(study)}


def kinds(**sections):
    return {disclosure.kind for disclosure in list_disclosures(make_tiny_study(**sections))}


def read_officer_table():
    """Title of a row -> its cells by column."""
    lines = (ROOT / "docs" / "officer.md").read_text("utf-8").splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("| what | when |"))
    header = [cell.strip() for cell in lines[start].strip("|").split("|")]
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[re.match(r"\*\*(.+?)\*\*", cells[0])[1]] = dict(zip(header, cells, strict=True))
    return rows


def test_table_for_officers_has_the_same_rows():
    expected: dict[str, dict[str, str]] = {}
    for column, privacy in PRIVACY_BY_COLUMN.items():
        for content, disclosure in disclosures_by_content(privacy=privacy).items():
            row = expected.setdefault(content, {"when": disclosure.when} | dict.fromkeys(PRIVACY_BY_COLUMN, "not sent"))
            row[column] = PROTECTION_IN_DOCS[disclosure.protected_by]
    table = {
        title: {column: cell for column, cell in cells.items() if column != "what"}
        for title, cells in read_officer_table().items()
    }
    assert table == expected


def test_heartbeats_send_no_other_status():
    status = AgentStatus("st-anne", "north", "https://north", problem="/data/P-0042.png", warnings=("full", "slow"))
    assert set(status.reported_fields()) == set(STATUS_TEXTS)
    assert status.reported_fields()["warnings"] == 2


def test_data_summary_contains_what_the_list_says(tmp_path):
    hospital = Hospital(tmp_path)
    offer = hospital.make_offer(make_tiny_study(sites={"count": 2}, privacy=DP_SGD))
    settings = SETTINGS.model_copy(update={"simulated_site": "site-01"})
    countersigner = LedgerCountersigner(tmp_path / "receipts", hospital.coordinator)
    worker = open_run_worker(hospital.path, SITE, offer, countersigner.countersign, settings)
    summary = worker.describe_site()
    assert set(summary.to_dict()) == {"classes", "shape", "examples", "privacy_unit", "privacy_plan"}
    assert set(summary.examples) == {"train", "val", "test"}
    assert summary.privacy_plan.privacy_unit == "patient"
    (disclosure,) = [d for d in list_disclosures(worker.study) if d.kind == "data_summary"]
    for text in ("number of images for training, validation and testing", "names of the classes", "image size"):
        assert text in disclosure.detail
    for text in ("name of the privacy unit", "number of patients", "noise, sampling rate, steps, epsilon"):
        assert text in disclosure.detail
    assert "privacy plan" not in next(iter(list_disclosures(make_tiny_study()))).detail


@pytest.mark.parametrize("name", sorted(set(registered_components("strategies")) - {"centralized"}))
def test_update_text_names_everything_that_a_strategy_sends(name):
    strategy = make_tiny_study(strategy=name).strategy
    spec = RunSpec(make_tiny_study(strategy=name, model="cnn28"), (3, 28, 28), ("a", "b"), 3)
    sent = {
        key
        for dry_run_round in dry_run(strategy, spec.context, spec.initial_state)
        for key in (*dry_run_round.update.averaged, *dry_run_round.update.summed)
    }
    own_keys = {"scaffold": {"control"}, "fednova": {"pace", "travel"}, "qfedavg": {"bound"}}.get(name, set())
    assert sent - {"delta", "stats", "train_loss"} == own_keys
    assert bool(strategy.update_text) == bool(sent - {"train_loss"})
    assert ("update" in kinds(strategy=name)) == bool(strategy.update_text)
    if own_keys:
        assert strategy.update_text != Strategy.update_text


def test_local_training_sends_no_update():
    assert {"update", "norm_stats"}.isdisjoint(kinds(strategy="local_only"))
    assert "loss" in kinds(strategy="local_only")


def test_secure_aggregation_hides_the_weight_only_from_the_update():
    privacy = {"secure_aggregation": {}}
    weight = disclosures_by_content(privacy=privacy)["Number of training images"]
    assert (weight.protected_by, weight.reason) == (
        "unprotected",
        "unprotected: masked here, but the data summary states it",
    )
    assert "weight" not in kinds(privacy=privacy, weighting="equal")
    assert {"weight", "work"} <= kinds(weighting="equal")


def test_update_of_both_protections_names_both():
    update = disclosures_by_content(privacy=DP_SGD | {"secure_aggregation": {}})["Model update"]
    assert (update.protected_by, update.reason) == (
        "dp",
        "noise on what each patient adds; masked: only the sum is seen",
    )
    hidden_site = disclosures_by_content(privacy={"client_level_dp": {"noise_multiplier": 2.0}}, weighting="equal")
    assert hidden_site["Model update"].protected_by == "unprotected"
    assert hidden_site["Models of all rounds"].protected_by == "dp"


def test_scores_are_listed_by_split_and_frequency():
    study = make_tiny_study(evaluation=EVALUATION | {"every": 3})
    when = {d.kind: d.when for d in list_disclosures(study) if d.kind.startswith("scores/")}
    assert when == {"scores/val": "every 3 rounds", "scores/train": "every 3 rounds", "scores/test": "once, at the end"}


def test_codecs_are_described_with_their_settings():
    study = make_tiny_study(compression={"uplink": [{"name": "topk", "fraction": 0.05}, {"name": "qsgd", "bits": 2}]})
    (update,) = [d for d in list_disclosures(study, 1234) if d.kind == "update"]
    assert update.detail == (
        "the change of every weight, 1,234 numbers; only the largest 5 % of the numbers, with error feedback; rounded at "
        "random to 2 bits a number"
    )
