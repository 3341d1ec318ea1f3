"""Offering, approving, beginning, pausing, resuming and stopping a run through the API."""

import json

import pytest

from pipeline.core.errors import IncompatibleStudyError
from pipeline.records.run_control import RunControl
from pipeline.service.web.app import create_app
from pipeline.service.web.describe_study import describe_study_file
from pipeline.study.disclosures import list_disclosures
from pipeline.study.offer import read_offer
from pipeline.study.toml_file import parse_study
from tests.support.service_factory import STUDY_TOML, ApiCaller, make_heartbeat


@pytest.fixture
def sites(service):
    return {name: service.enrol_site(name) for name in ("a", "b", "c")}


def read_requested_state(service, run):
    return RunControl.read(service.home.runs_folder / run).desired_state


def test_sites_receive_the_offer(service, sites):
    run = service.offer_run()
    run_view = service.lead.get(f"/api/runs/{run}").json()
    assert run.startswith("moons-")
    assert (run_view["state"], run_view["rounds"], run_view["strategy"], run_view["min_sites"]) == (
        "offered",
        4,
        "fedavg",
        1,
    )
    assert [s["site"] for s in run_view["sites"]] == ["a", "b", "c"]
    assert run_view["headline"] is None
    assert "A small study." in run_view["study_summary"]
    (offer_json,) = sites["a"].post("/site/heartbeat", make_heartbeat()).json()["offers"]
    offer = read_offer(json.dumps(offer_json))
    assert offer.digest == service.store.find_run(run).digest
    assert offer.site_keys == {s.name: s.key for s in service.store.list_sites()}
    assert run_view["offer"] == offer_json
    assert read_requested_state(service, run) == "run"
    assert sites["a"].post("/site/heartbeat", make_heartbeat(held_offers=[offer.digest])).json()["offers"] == []


def test_offer_to_some_of_the_sites(service, sites):
    run = service.offer_run(sites=["c", "a"], min_sites=2)
    assert service.store.find_run(run).sites == ["c", "a"]
    assert sites["b"].post("/site/heartbeat", make_heartbeat()).json() | {"time": ""} == {
        "offers": [],
        "runs": [],
        "time": "",
        "registered": False,
    }
    response = sites["b"].post("/site/heartbeat", make_heartbeat(service.make_approval(run)))
    assert response.status_code == 200
    assert service.store.approved_sites(run) == set()
    assert "ignored" in service.app.state.context.log.read_last(1)[0]["event"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"study": "name = "}, "not valid TOML"),
        ({"study": STUDY_TOML + "[lokal]\nlr = 1"}, "unknown key 'lokal'"),
        ({"sites": ["a", "nobody"]}, "not enrolled: nobody"),
        ({"sites": ["a", "a"]}, "every site once"),
        ({"sites": []}, "at least one"),
        ({"sites": ["../a"]}, "sites.0"),
        ({"min_sites": 4}, "at least 4"),
        ({"min_sites": 0}, "min_sites"),
        ({"study": STUDY_TOML + "[round]\nquorum = 9"}, "at least 9"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_invalid_offer_is_refused(service, sites, body, message):
    response = service.lead.post("/api/runs", {"study": STUDY_TOML} | body)
    assert response.status_code == 422, response.text
    assert message in response.json()["error"]
    assert service.store.list_runs() == []
    assert list(service.home.runs_folder.iterdir()) == []


def test_offer_without_enrolled_sites_is_refused(service):
    assert "coordinator invite" in service.lead.post("/api/runs", {"study": STUDY_TOML}).json()["error"]


def test_study_for_simulation_only_is_refused(service, sites):
    def check(study):
        raise IncompatibleStudyError(f"{study.name}: only a simulation has that")

    lead = ApiCaller(create_app(service.home, service.store, check_study=check), service.lead_token)
    response = lead.post("/api/runs", {"study": STUDY_TOML})
    assert (response.status_code, response.json()["error"]) == (422, "moons: only a simulation has that")


def test_actions_of_a_lead_from_offer_to_stop(service, sites):
    run = service.offer_run(min_sites=2)
    refusal = service.lead.post(f"/api/runs/{run}/begin")
    assert refusal.status_code == 409
    assert "approval of 2 sites" in refusal.json()["error"]
    for name in ("a", "b"):
        sites[name].post("/site/heartbeat", make_heartbeat(service.make_approval(run)))
    states = {(x["site"], x["state"]) for x in service.lead.get("/api/approvals").json()}
    assert states == {("a", "approved"), ("b", "approved"), ("c", "pending")}
    assert service.lead.post(f"/api/runs/{run}/begin").json()["state"] == "starting"
    service.store.set_run_state(run, "running")
    assert service.lead.post(f"/api/runs/{run}/pause").json()["state"] == "pausing"
    assert read_requested_state(service, run) == "pause"
    assert service.lead.post(f"/api/runs/{run}/resume").status_code == 409
    service.store.set_run_state(run, "paused")
    assert service.lead.post(f"/api/runs/{run}/resume").json()["state"] == "starting"
    assert read_requested_state(service, run) == "run"
    assert service.lead.post(f"/api/runs/{run}/stop").json()["state"] == "stopping"
    assert read_requested_state(service, run) == "stop"
    service.store.set_run_state(run, "finished")
    refusal = service.lead.post(f"/api/runs/{run}/resume")
    assert (refusal.status_code, read_requested_state(service, run)) == (409, "stop")
    assert "new run" in refusal.json()["error"]


def test_last_approval_begins_the_run(service, sites):
    run = service.offer_run()
    for site in sites.values():
        assert service.run_state(run) == "offered"
        site.post("/site/heartbeat", make_heartbeat(service.make_approval(run)))
    assert service.run_state(run) == "starting"


def test_revoked_and_expired_approvals_are_shown(service, sites):
    run = service.offer_run()
    sites["a"].post("/site/heartbeat", make_heartbeat(service.make_approval(run, hours=1)))
    sites["b"].post("/site/heartbeat", make_heartbeat(service.make_approval(run)))
    service.clock.advance(hours=2)
    digest = service.store.find_run(run).digest
    revocation = {"run": run, "offer": digest, "at": service.clock().isoformat()}
    sites["b"].post("/site/heartbeat", make_heartbeat(revoked=[revocation]))
    states = {x["site"]: x["state"] for x in service.lead.get("/api/approvals").json()}
    assert states == {"a": "expired", "b": "revoked", "c": "pending"}
    assert service.store.approved_sites(run) == set()
    site_by_name = {s["site"]: s for s in service.lead.get(f"/api/runs/{run}").json()["sites"]}
    assert site_by_name["b"]["revoked"] is not None
    assert site_by_name["a"]["revoked"] is None


def test_silent_site_is_not_connected(service, sites):
    service.clock.advance(seconds=14)
    sites["a"].post("/site/heartbeat", make_heartbeat(status={"phase": "idle"}))
    service.clock.advance(seconds=2)
    site_by_name = {s["site"]: s for s in service.lead.get("/api/sites").json()}
    assert {name: s["connected"] for name, s in site_by_name.items()} == {"a": True, "b": False, "c": False}
    assert site_by_name["a"]["status"] == {"phase": "idle"}


@pytest.mark.parametrize("id", ["..", "%2e%2e", "..%2f..", "a%2fb", "nothing", ".hidden", "a%00b", "a" * 200])
def test_invalid_run_ids_are_not_found(service, sites, id):
    service.offer_run()
    for path in ("", "/rounds", "/results", "/files", "/files/study.toml"):
        assert service.lead.get(f"/api/runs/{id}{path}").status_code in (404, 422), path
    assert sites["a"].get(f"/site/runs/{id}/models/global").status_code in (404, 422)
    for action in ("begin", "pause", "resume", "stop"):
        assert service.lead.post(f"/api/runs/{id}/{action}").status_code in (404, 405, 422)


def test_study_described_in_sentences():
    described = describe_study_file(STUDY_TOML + "[client_sampling]\nfraction = 0.5\n[local]\nsteps = 7\n")
    lines = described["study_summary"]
    assert "4 rounds: each asks 50% of the sites for 7 steps of training." in lines
    assert any("No privacy budget" in line for line in lines)
    assert not any("only sums" in line for line in lines)


def test_study_described_by_what_leaves_the_sites(service, sites):
    run_view = service.lead.get(f"/api/runs/{service.offer_run()}").json()
    protection = {row["content"]: row["protection"] for row in run_view["disclosures"]}
    assert protection["Data summary"] == protection["Model update"] == "unprotected"
    assert protection["Approval"] == "nothing to protect"
    study = parse_study(run_view["study"], "study.toml", {})
    assert list(protection) == [disclosure.content for disclosure in list_disclosures(study)]


def test_study_that_this_version_cannot_read_is_still_shown():
    described = describe_study_file(STUDY_TOML.replace("moons_net", "gone_net"))
    assert described["disclosures"] == []
    assert described["study_summary"][0].startswith("This version of hemofed cannot read the study: ")
    assert "gone_net" in described["study_summary"][0]
