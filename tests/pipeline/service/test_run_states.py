"""A study is offered, approved, begun, paused and stopped through the API."""

import json

import pytest

from pipeline.core.errors import IncompatibleStudyError
from pipeline.service.runtime.create_run import describe_study
from pipeline.service.web.app import create_app
from pipeline.study.offer import read_offer
from tests.pipeline.service.conftest import STUDY, Web, beating


@pytest.fixture
def sites(world):
    return {name: world.enrol(name) for name in ("a", "b", "c")}


def control(world, run):
    return json.loads((world.home.runs / run / "control.json").read_text())["want"]


def test_an_offer_is_what_the_sites_are_sent(world, sites):
    run = world.offer()
    shown = world.lead.get(f"/api/runs/{run}").json()
    assert run.startswith("moons-")
    assert (shown["state"], shown["rounds"], shown["strategy"], shown["fewest"]) == ("offered", 4, "fedavg", 1)
    assert [s["site"] for s in shown["sites"]] == ["a", "b", "c"]
    assert shown["headline"] is None
    assert "A small study." in shown["about"]
    (sent,) = sites["a"].post("/site/beat", beating()).json()["offers"]
    offer = read_offer(json.dumps(sent))
    assert offer.digest == world.store.run(run).digest
    assert offer.site_keys == {s.name: s.key for s in world.store.sites()}
    assert shown["offer"] == sent
    assert control(world, run) == "run"
    assert sites["a"].post("/site/beat", beating(have=[offer.digest])).json()["offers"] == []


def test_only_the_named_sites_are_asked(world, sites):
    run = world.offer(sites=["c", "a"], fewest=2)
    assert world.store.run(run).sites == ["c", "a"]
    assert sites["b"].post("/site/beat", beating()).json() | {"time": ""} == {
        "offers": [],
        "runs": [],
        "time": "",
        "registered": False,
    }
    stranger = sites["b"].post("/site/beat", beating(world.approval(run)))
    assert stranger.status_code == 200
    assert world.store.approved_sites(run) == set()
    assert "ignored" in world.app.state.parts.log.last(1)[0]["event"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"study": "name = "}, "not valid TOML"),
        ({"study": STUDY + "[lokal]\nlr = 1"}, "unknown key 'lokal'"),
        ({"sites": ["a", "nobody"]}, "not enrolled: nobody"),
        ({"sites": ["a", "a"]}, "every site once"),
        ({"sites": []}, "at least one"),
        ({"sites": ["../a"]}, "sites.0"),
        ({"fewest": 4}, "at least 4"),
        ({"fewest": 0}, "fewest"),
        ({"study": STUDY + "[round]\nquorum = 9"}, "at least 9"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_cannot_run_is_not_offered(world, sites, body, words):
    told = world.lead.post("/api/runs", {"study": STUDY} | body)
    assert told.status_code == 422, told.text
    assert words in told.json()["error"]
    assert world.store.runs() == []
    assert list(world.home.runs.iterdir()) == []


def test_without_sites_there_is_no_run(world):
    assert "coordinator invite" in world.lead.post("/api/runs", {"study": STUDY}).json()["error"]


def test_a_study_unfit_for_hospitals_is_refused(world, sites):
    def check(study):
        raise IncompatibleStudyError(f"{study.name}: only a simulation has that")

    strict = Web(create_app(world.home, world.store, check_study=check), world.lead_token)
    told = strict.post("/api/runs", {"study": STUDY})
    assert (told.status_code, told.json()["error"]) == (422, "moons: only a simulation has that")


def test_from_offer_to_stop(world, sites):
    run = world.offer(fewest=2)
    early = world.lead.post(f"/api/runs/{run}/begin")
    assert early.status_code == 409
    assert "approval of 2 sites" in early.json()["error"]
    for name in ("a", "b"):
        sites[name].post("/site/beat", beating(world.approval(run)))
    states = {(x["site"], x["state"]) for x in world.lead.get("/api/approvals").json()}
    assert states == {("a", "approved"), ("b", "approved"), ("c", "pending")}
    assert world.lead.post(f"/api/runs/{run}/begin").json()["state"] == "starting"
    world.store.state(run, "running")
    assert world.lead.post(f"/api/runs/{run}/pause").json()["state"] == "pausing"
    assert control(world, run) == "pause"
    assert world.lead.post(f"/api/runs/{run}/resume").status_code == 409
    world.store.state(run, "paused")
    assert world.lead.post(f"/api/runs/{run}/resume").json()["state"] == "starting"
    assert control(world, run) == "run"
    assert world.lead.post(f"/api/runs/{run}/stop").json()["state"] == "stopping"
    assert control(world, run) == "stop"
    world.store.state(run, "finished")
    late = world.lead.post(f"/api/runs/{run}/resume")
    assert (late.status_code, control(world, run)) == (409, "stop")
    assert "new run" in late.json()["error"]


def test_the_last_approval_begins_the_run(world, sites):
    run = world.offer()
    for site in sites.values():
        assert world.state(run) == "offered"
        site.post("/site/beat", beating(world.approval(run)))
    assert world.state(run) == "starting"


def test_withdrawals_and_expiry_are_shown(world, sites):
    run = world.offer()
    sites["a"].post("/site/beat", beating(world.approval(run, hours=1)))
    sites["b"].post("/site/beat", beating(world.approval(run)))
    world.clock.pass_by(hours=2)
    digest = world.store.run(run).digest
    gone = {"run": run, "offer": digest, "at": world.clock().isoformat()}
    sites["b"].post("/site/beat", beating(withdrawn=[gone]))
    states = {x["site"]: x["state"] for x in world.lead.get("/api/approvals").json()}
    assert states == {"a": "expired", "b": "withdrawn", "c": "pending"}
    assert world.store.approved_sites(run) == set()
    shown = {s["site"]: s for s in world.lead.get(f"/api/runs/{run}").json()["sites"]}
    assert shown["b"]["withdrawn"] is not None
    assert shown["a"]["withdrawn"] is None


def test_who_is_silent_is_not_connected(world, sites):
    world.clock.pass_by(seconds=14)
    sites["a"].post("/site/beat", beating(status={"phase": "idle"}))
    world.clock.pass_by(seconds=2)
    shown = {s["site"]: s for s in world.lead.get("/api/sites").json()}
    assert {name: s["connected"] for name, s in shown.items()} == {"a": True, "b": False, "c": False}
    assert shown["a"]["status"] == {"phase": "idle"}


@pytest.mark.parametrize("id", ["..", "%2e%2e", "..%2f..", "a%2fb", "nothing", ".hidden", "a%00b", "a" * 200])
def test_a_runs_name_is_no_path(world, sites, id):
    world.offer()
    for path in ("", "/rounds", "/results", "/files", "/files/study.toml"):
        assert world.lead.get(f"/api/runs/{id}{path}").status_code in (404, 422), path
    assert sites["a"].get(f"/site/runs/{id}/models/global").status_code in (404, 422)
    for action in ("begin", "pause", "resume", "stop"):
        assert world.lead.post(f"/api/runs/{id}/{action}").status_code in (404, 405, 422)


def test_a_study_in_plain_words():
    lines = describe_study(
        {
            "rounds": 3,
            "strategy": {"name": "fedavg"},
            "model": {"name": "cnn"},
            "data": {"name": "folder"},
            "client_sampling": {"fraction": 0.5},
            "privacy": {},
        }
    )
    assert any("50% of the sites" in line for line in lines)
    assert any("No privacy budget" in line for line in lines)
