import json
from datetime import UTC, datetime
from importlib.metadata import version

import pytest
import typer
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant

from pipeline.cli.commands.audit import audit_command
from privacy.audit.collect import collect_facts
from tests.support.audit_factory import copied, ran

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    return ran(
        tmp_path_factory.mktemp("audit") / "run", privacy={"dp_sgd": {"noise_multiplier": 1.4, "epsilon_budget": 20.0}}
    )


@pytest.fixture(scope="module")
def facts(private):
    return collect_facts(private, NOW)


def ledger(folder, site="site-02"):
    return folder.path / "homes" / site / "ledger.jsonl"


def test_a_run_in_order_is_in_order(facts):
    assert facts["ok"], facts["problems"]
    assert facts["written"] == "2026-01-02T03:04:05+00:00"
    assert list(facts["sites"]) == ["site-01", "site-02", "site-03"]
    assert all(found["ledger"]["ok"] and found["ledger"]["anchored"] for found in facts["sites"].values())
    assert facts["software"]["audit"]["opacus"] == version("opacus")
    json.dumps(facts, allow_nan=False)


def test_spent_is_what_another_implementation_says(facts, private):
    promises = json.loads((private.path / "privacy.json").read_text())["dp_sgd"]
    for site in ("site-01", "site-02"):
        found = facts["sites"][site]
        p = promises[site]
        accountant = PLDAccountant()
        step = PoissonSampledDpEvent(p["rate"], GaussianDpEvent(p["noise"]))
        accountant.compose(SelfComposedDpEvent(step, p["steps"] * 2))
        assert found["spent"] == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)
        assert found["left"] == pytest.approx(20.0 - found["spent"])
        again = found["recount"]
        assert again["again"] == pytest.approx(found["spent"], rel=1e-9)
        assert again["pld"] == found["spent"] < again["rdp"]
        assert again["dp_accounting"] == pytest.approx(again["rdp"], rel=1e-2)
        assert [point["turn"] for point in found["curve"]] == [1, 2]
        assert found["curve"][1]["epsilon"] == found["spent"]


def test_the_headline_is_the_worst_site(facts):
    lead = facts["headline"]
    assert lead["epsilon"] == max(found["spent"] for found in facts["sites"].values())
    assert lead["unit"] == "patient"
    assert facts["person"]["examples"] == sum(found["promise"]["examples"] for found in facts["sites"].values())


def test_what_left_the_sites_is_listed_with_what_protects_it(facts):
    by = {row["key"]: row["by"] for row in facts["disclosures"]}
    assert by["update"] == by["final"] == "dp"
    assert by["weight"] == by["work"] == by["scores/val"] == by["scores/test"] == by["profile"] == "unprotected"
    assert "loss" not in by  # the guard keeps it at the site
    assert facts["sites"]["site-01"]["took"]["judged"] == {"val": 3}


def edited(text):
    return text.replace('"steps":', '"steps":1', 1)


def shortened(text):
    return "".join(text.splitlines(keepends=True)[:-2])


def emptied(text):
    return ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edited, "it was edited"),
        (shortened, "its end was cut off"),
        (shortened, "took part in round 2 without a charge"),
        (shortened, "told the coordinator that epsilon"),
        (emptied, "its ledger does not verify: there is no entry"),
        (None, "has no ledger"),
    ],
)
def test_a_ledger_that_was_tampered_with_is_found(private, tmp_path, facts, change, words):
    bad = copied(private, tmp_path / "bad")
    if change is None:
        ledger(bad).unlink()
    else:
        ledger(bad).write_text(change(ledger(bad).read_text()))
    found = collect_facts(bad, NOW)
    assert not found["ok"]
    assert all(problem.startswith("site-02: ") for problem in found["problems"])
    assert any(words in problem for problem in found["problems"]), found["problems"]
    assert found["headline"]["epsilon"] == facts["headline"]["epsilon"]  # a cut ledger makes no promise better


def test_a_record_of_other_noise_is_found(private, tmp_path):
    bad = copied(private, tmp_path / "bad")
    file = bad.path / "privacy.json"
    told = json.loads(file.read_text())
    told["dp_sgd"]["site-03"]["noise"] *= 2
    file.write_text(json.dumps(told))
    assert collect_facts(bad)["problems"] == [
        "site-03: was charged for other noise, rates, steps or units than privacy.json promised"
    ]


def test_an_attack_that_finds_more_than_was_promised_is_a_problem(private, tmp_path):
    bad = copied(private, tmp_path / "bad")
    canaries = {"epsilon_low": 9.0, "epsilon_promised": 8.0, "confidence": 0.95}
    (bad.path / "attacks.json").write_text(json.dumps({"canaries": canaries}))
    assert ["canaries" in problem for problem in collect_facts(bad)["problems"]] == [True]
    canaries["epsilon_low"] = 7.0
    (bad.path / "attacks.json").write_text(json.dumps({"canaries": canaries}))
    assert collect_facts(bad)["ok"]


def test_the_command_fails_once_all_is_written(private, tmp_path, capsys):
    bad = copied(private, tmp_path / "bad")
    ledger(bad).write_text(edited(ledger(bad).read_text()))
    with pytest.raises(typer.Exit) as end:
        audit_command(bad.path, False, None, None, True)
    told = capsys.readouterr()
    assert end.value.exit_code == 1
    assert not json.loads(told.out)["ok"]
    assert "not in order: site-02" in told.err
    assert sorted(path.name for path in (bad.path / "audit").iterdir()) == ["audit.html", "audit.json", "audit.pdf"]


def test_sites_that_sit_out_are_told(tmp_path):
    folder = ran(tmp_path / "run", rounds=3, privacy={"dp_sgd": {"noise_multiplier": 1.4, "epsilon_budget": 4.5}})
    found = collect_facts(folder)
    assert found["ok"], found["problems"]
    for site in found["sites"].values():
        assert site["spent"] <= 4.5
        assert site["took"]["sat_out"] == [3]
        assert site["refusals"][-1]["turn"] == 3


def test_two_studies_on_the_same_data_share_a_budget(tmp_path):
    from pipeline.coordinator.run_folder import RunFolder
    from pipeline.runs.simulation import run_simulation
    from tests.support.audit_factory import tiny

    for seed in (1, 2):
        study = tiny(seed=seed, rounds=1, privacy={"dp_sgd": {"noise_multiplier": 6.0, "epsilon_budget": 20.0}})
        folder = RunFolder.create(tmp_path / f"run{seed}", study)
        run_simulation(study, folder, homes_folder=tmp_path / "homes")
    found = collect_facts(folder)
    site = found["sites"]["site-01"]
    assert found["ok"], found["problems"]
    assert found["coordinator"]["shared_homes"]
    assert len(site["charges"]) == 2
    assert len(site["curve"]) == 1
    assert 0 < site["before"] < site["spent"]
    assert site["recount"]["how"] == "rdp filter"
    assert site["recount"]["again"] == pytest.approx(site["spent"])
