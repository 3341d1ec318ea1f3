"""The facts of an audit: epsilon, problems and disclosures of tiny private runs."""

import json
from datetime import UTC, datetime
from importlib.metadata import version

import pytest
import typer
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant

from pipeline.cli.commands.audit import audit_command
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import RunFolderError
from pipeline.records.privacy_record import ClientLevelDpRecord
from pipeline.runs.simulation import run_simulation
from privacy.audit.collect import _client_level_dp_facts, collect_facts
from tests.support.audit_factory import copy_run_folder, make_tiny_study, run_tiny_study
from tests.support.run_folder_factory import make_record

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture(scope="module")
def private_run(tmp_path_factory):
    return run_tiny_study(
        tmp_path_factory.mktemp("audit") / "run", privacy={"dp_sgd": {"noise_multiplier": 1.4, "epsilon_budget": 20.0}}
    )


@pytest.fixture(scope="module")
def facts(private_run):
    return collect_facts(private_run, NOW)


def ledger_path(folder, site="site-02"):
    return folder.path / "homes" / site / "ledger.jsonl"


def test_private_run_has_no_problems(facts):
    assert facts.ok, facts.problems
    assert facts.written == "2026-01-02T03:04:05+00:00"
    assert list(facts.sites) == ["site-01", "site-02", "site-03"]
    assert all(site.ledger.ok and site.ledger.anchored for site in facts.sites.values())
    assert facts.software.audit["opacus"] == version("opacus")
    json.dumps(facts.model_dump(mode="json"), allow_nan=False)


def test_spent_epsilon_equals_dp_accounting(facts, private_run):
    plans = json.loads((private_run.path / "privacy.json").read_text())["dp_sgd"]
    for name in ("site-01", "site-02"):
        site, plan = facts.sites[name], plans[name]
        accountant = PLDAccountant()
        step = PoissonSampledDpEvent(plan["sampling_rate"], GaussianDpEvent(plan["noise_multiplier"]))
        accountant.compose(SelfComposedDpEvent(step, plan["steps_per_round"] * 2))
        assert site.spending.spent == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)
        assert site.spending.left == pytest.approx(20.0 - site.spending.spent)
        recomputed = site.spending.recomputed
        assert recomputed.epsilon == pytest.approx(site.spending.spent, rel=1e-9)
        assert recomputed.by_accountant.pld == site.spending.spent < recomputed.by_accountant.rdp
        assert recomputed.by_accountant.dp_accounting == pytest.approx(recomputed.by_accountant.rdp, rel=1e-2)
        assert [point.round for point in site.spending.curve] == [1, 2]
        assert site.spending.curve[1].epsilon == site.spending.spent


def test_headline_is_the_site_with_the_largest_epsilon(facts):
    headline = facts.headline
    assert headline.spent.epsilon == max(site.spending.spent for site in facts.sites.values())
    assert headline.unit == "patient"
    num_examples = sum(site.privacy_plan.num_examples for site in facts.sites.values())
    assert facts.data_subject.examples == num_examples


def test_disclosures_name_their_protection(facts):
    protected_by = {row.kind: row.protected_by for row in facts.disclosures}
    assert protected_by["update"] == protected_by["final_model"] == "dp"
    for kind in ("data_summary", "weight", "work", "scores/val", "scores/test", "profile"):
        assert protected_by[kind] == "unprotected"
    assert "loss" not in protected_by  # with DP-SGD it stays at the site
    assert facts.sites["site-01"].participation.evaluated == {"val": 3}


def test_disclosures_have_the_numbers_of_the_run(facts):
    disclosures = {row.kind: row for row in facts.disclosures}
    assert disclosures["update"].detail.endswith("6,926 numbers")
    assert "Gaussian noise of 1.40 times this bound" in disclosures["update"].reason
    assert "a site has 8 images" in disclosures["scores/test"].reason
    assert "the site's privacy plan: number of patients" in disclosures["data_summary"].detail
    assert disclosures["final_model"].detail == f"of round {facts.released.round}, chosen by val accuracy"
    assert disclosures["final_model"].reason.startswith("computed only from noised updates")


def test_invalid_findings_of_attacks_are_refused(private_run, tmp_path):
    attacked_run = copy_run_folder(private_run, tmp_path / "attacked")
    (attacked_run.path / "attacks.json").write_text(json.dumps({"canaries": {"epsilon": 3.0}}))
    with pytest.raises(RunFolderError, match=r"2 invalid fields.*try them again with `hemofed audit .* --attack`"):
        collect_facts(attacked_run)


def edit_steps(text):
    return text.replace('"steps":', '"steps":1', 1)


def cut_two_lines(text):
    return "".join(text.splitlines(keepends=True)[:-2])


def empty_file(text):
    return ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit_steps, "it was edited"),
        (cut_two_lines, "its end was cut off"),
        (cut_two_lines, "took part in round 2 without a charge"),
        (cut_two_lines, "to the coordinator, but its ledger has"),
        (empty_file, "its ledger does not verify: there is no entry"),
        (None, "has no ledger"),
    ],
)
def test_manipulated_ledger_is_a_problem(private_run, tmp_path, facts, change, message):
    changed_run = copy_run_folder(private_run, tmp_path / "changed")
    if change is None:
        ledger_path(changed_run).unlink()
    else:
        ledger_path(changed_run).write_text(change(ledger_path(changed_run).read_text()))
    changed_facts = collect_facts(changed_run, NOW)
    assert not changed_facts.ok
    assert all(problem.startswith("site-02: ") for problem in changed_facts.problems)
    assert any(message in problem for problem in changed_facts.problems), changed_facts.problems
    assert changed_facts.headline.spent.epsilon == facts.headline.spent.epsilon  # a cut ledger lowers no epsilon


def test_charges_that_differ_from_privacy_json_are_a_problem(private_run, tmp_path):
    changed_run = copy_run_folder(private_run, tmp_path / "changed")
    file = changed_run.path / "privacy.json"
    record = json.loads(file.read_text())
    record["dp_sgd"]["site-03"]["noise_multiplier"] *= 2
    file.write_text(json.dumps(record))
    assert collect_facts(changed_run).problems == (
        "site-03: its charges differ from privacy.json in noise multiplier, sampling rate, steps or unit",
    )


def test_attack_above_the_promised_bound_is_a_problem(private_run, tmp_path):
    attacked_run = copy_run_folder(private_run, tmp_path / "attacked")
    canaries = {"epsilon_low": 9.0, "epsilon_promised": 8.0, "confidence": 0.95}
    (attacked_run.path / "attacks.json").write_text(json.dumps({"canaries": canaries}))
    (problem,) = collect_facts(attacked_run).problems
    assert "the attack “canaries” exceeds the promised bound" in problem
    canaries["epsilon_low"] = 7.0
    (attacked_run.path / "attacks.json").write_text(json.dumps({"canaries": canaries}))
    assert collect_facts(attacked_run).ok


def test_audit_command_fails_after_writing_all_files(private_run, tmp_path, capsys):
    changed_run = copy_run_folder(private_run, tmp_path / "changed")
    ledger_path(changed_run).write_text(edit_steps(ledger_path(changed_run).read_text()))
    with pytest.raises(typer.Exit) as exit_info:
        audit_command(changed_run.path, False, None, None, True)
    output = capsys.readouterr()
    assert exit_info.value.exit_code == 1
    assert not json.loads(output.out)["ok"]
    assert "problem: site-02" in output.err
    names = sorted(path.name for path in (changed_run.path / "audit").iterdir())
    assert names == ["audit.html", "audit.json", "audit.pdf"]


def test_rounds_declined_for_the_budget_are_listed(tmp_path):
    folder = run_tiny_study(
        tmp_path / "run", rounds=3, privacy={"dp_sgd": {"noise_multiplier": 1.4, "epsilon_budget": 4.5}}
    )
    facts = collect_facts(folder)
    assert facts.ok, facts.problems
    for site in facts.sites.values():
        assert site.spending.spent <= 4.5
        assert site.participation.out_of_budget == (3,)
        assert site.spending.refusals[-1].round == 3


def test_two_studies_on_the_same_data_share_a_budget(tmp_path):
    for seed in (1, 2):
        study = make_tiny_study(
            seed=seed, rounds=1, privacy={"dp_sgd": {"noise_multiplier": 6.0, "epsilon_budget": 20.0}}
        )
        folder = RunFolder.create(tmp_path / f"run{seed}", study)
        run_simulation(study, folder, homes_folder=tmp_path / "homes")
    facts = collect_facts(folder)
    site = facts.sites["site-01"]
    assert facts.ok, facts.problems
    assert facts.coordinator.shared_homes
    assert len(site.spending.charges) == 2
    assert len(site.spending.curve) == 1
    assert 0 < site.spending.spent_before < site.spending.spent
    assert site.spending.recomputed.accountant == "rdp filter"
    assert site.spending.recomputed.epsilon == pytest.approx(site.spending.spent)


def test_a_repeated_round_of_client_level_dp_is_another_release():
    plan = ClientLevelDpRecord(
        noise_multiplier=2.0,
        max_update_norm=1.0,
        sensitivity=1.0,
        delta=1e-5,
        epsilon=4.0,
        accountant="prv",
        rounds=3,
        sites=2,
        num_sampled_clients=2,
    )
    rounds = [make_record(1, {"a": 0.5, "b": 0.5}, attempt=0), make_record(2, {"a": 0.5}, attempt=4)]
    assert _client_level_dp_facts(plan, rounds).releases == 6  # a: 1, and 5 attempts
    assert _client_level_dp_facts(plan, rounds[:1]).releases == 1
