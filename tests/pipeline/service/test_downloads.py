"""What of a run may be downloaded, and by whom."""

import json
import math

import pytest

from tests.support.service_factory import make_heartbeat


def record(turn, **more):
    return {"round": turn, "metrics": {"val": {"pooled": {"accuracy": 0.5 + turn / 10}}}, "missed": {}} | more


def write_rounds(service, run, *records):
    service.write_run_file(run, "rounds.jsonl", "".join(json.dumps(r) + "\n" for r in records).encode())


@pytest.fixture
def done(service):
    """A run of three sites in two groups, come to its end."""
    sites = {name: service.enrol_site(name) for name in ("a", "b", "c")}
    run = service.offer_run()
    for name in ("a", "b"):
        sites[name].post("/site/heartbeat", make_heartbeat(service.make_approval(run)))
    write_rounds(service, run, record(0), record(1, groups={"a": "0", "b": "1", "c": "1"}), record(2))
    for name in ("global", "group/0", "group/1", "site/a", "site/b"):
        service.write_run_file(run, f"models/{name}.safetensors", name.encode())
    service.write_run_file(run, "report.html", b"<p>report")
    service.write_run_file(run, "plots/curve.png")
    service.write_run_file(run, "cells/patient.png")
    service.write_run_file(run, "checkpoint/round-2.safetensors")
    service.write_run_file(
        run, "results.json", json.dumps({"test": {"pooled": {"accuracy": 0.9, "loss": math.nan}}}).encode()
    )
    service.store.set_run_state(run, "finished")
    return run, sites


def test_rounds_results_and_headline(service, done):
    run, _ = done
    assert [r["round"] for r in service.lead.get(f"/api/runs/{run}/rounds").json()] == [0, 1, 2]
    assert [r["round"] for r in service.lead.get(f"/api/runs/{run}/rounds?after=1").json()] == [2]
    assert service.lead.get(f"/api/runs/{run}/rounds?after=x").status_code == 422
    assert service.lead.get(f"/api/runs/{run}/results").json()["test"]["pooled"]["loss"] is None  # NaN is no JSON
    assert service.lead.get(f"/api/runs/{run}/privacy").status_code == 404
    shown = service.lead.get(f"/api/runs/{run}").json()
    assert (shown["round"], shown["headline"]) == (2, {"split": "test", "metric": "accuracy", "value": 0.9})
    (service.home.runs_folder / run / "results.json").unlink()
    assert service.lead.get(f"/api/runs/{run}").json()["headline"] == {
        "split": "val",
        "metric": "accuracy",
        "value": 0.7,
    }


def test_a_round_that_is_being_written_waits(service, done):
    run, _ = done
    with (service.home.runs_folder / run / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "met')
    assert [r["round"] for r in service.lead.get(f"/api/runs/{run}/rounds").json()] == [0, 1, 2]


def test_the_list_is_all_there_is(service, done):
    run, _ = done
    listed = {f["path"]: f for f in service.add_user("viewer").get(f"/api/runs/{run}/files").json()}
    assert set(listed) == {
        "models/global.safetensors",
        "models/group/0.safetensors",
        "models/group/1.safetensors",
        "report.html",
        "plots/curve.png",
        "results.json",
        "rounds.jsonl",
        "study.toml",
    }
    assert listed["models/global.safetensors"] == {"path": "models/global.safetensors", "bytes": 6, "kind": "model"}
    for path in listed:
        response = service.lead.get(f"/api/runs/{run}/files/{path}")
        assert response.content == (service.home.runs_folder / run / path).read_bytes()


@pytest.mark.parametrize(
    "path",
    [
        "models/site/a.safetensors",
        "cells/patient.png",
        "checkpoint/round-2.safetensors",
        "control.json",
        "offer.json",
        "%2e%2e/%2e%2e/lead.token",
        "..%2f..%2flead.token",
        "models/..%2f..%2f..%2f..%2flead.token",
        "%2fetc%2fpasswd",
        "",
        "models",
        "report.html%00.png",
        "plots/link.png",
        "plots/%2e/curve.png",
        "models//global.safetensors",
    ],
)
def test_what_is_not_listed_is_not_sent(service, done, path):
    run, _ = done
    (service.home.runs_folder / run / "plots" / "link.png").symlink_to(service.home.token_path)
    response = service.lead.get(f"/api/runs/{run}/files/{path}")
    if path == "":
        assert response.status_code in (307, 404)
    else:
        assert response.status_code == 404
    assert service.lead_token not in response.text


def test_a_report_is_shown_in_a_sandbox_and_the_rest_is_saved(service, done):
    run, _ = done
    page = service.lead.get(f"/api/runs/{run}/files/report.html")
    assert page.headers["content-type"].startswith("text/html")
    assert "sandbox" in page.headers["content-security-policy"]
    assert "script-src" not in page.headers["content-security-policy"]
    assert page.headers["content-disposition"].startswith("inline")
    model = service.lead.get(f"/api/runs/{run}/files/models/global.safetensors")
    assert model.headers["content-disposition"].startswith("attachment")
    assert page.headers["cache-control"] == model.headers["cache-control"] == "no-store"


def test_a_site_gets_the_common_model_and_its_groups(service, done):
    run, sites = done
    (response,) = sites["a"].post("/site/heartbeat", make_heartbeat()).json()["runs"]
    assert response == {"id": run, "state": "finished", "models": ["global", "group/0"]}
    assert sites["a"].get(f"/site/runs/{run}/models/global").content == b"global"
    assert sites["a"].get(f"/site/runs/{run}/models/group/0").content == b"group/0"
    assert sites["b"].get(f"/site/runs/{run}/models/group/1").content == b"group/1"


@pytest.mark.parametrize(
    "name",
    [
        "group/1",
        "site/a",
        "site/b",
        "group/..%2fsite%2fb",
        "..%2f..%2f..%2flead.token",
        "%2e%2e/checkpoint/round-2",
        "nothing",
        "global.safetensors",
        "global%00",
        "Global",
    ],
)
def test_a_site_gets_nothing_else(service, done, name):
    run, sites = done
    assert sites["a"].get(f"/site/runs/{run}/models/{name}").status_code == 404


def test_who_did_not_approve_gets_no_model(service, done):
    run, sites = done
    (response,) = sites["c"].post("/site/heartbeat", make_heartbeat()).json()["runs"]
    assert response["models"] == []
    assert sites["c"].get(f"/site/runs/{run}/models/global").status_code == 404


def test_a_site_outside_of_the_run_gets_nothing(service, done):
    run, _ = done
    late = service.enrol_site("d")
    assert late.post("/site/heartbeat", make_heartbeat()).json()["runs"] == []
    assert late.get(f"/site/runs/{run}/models/global").status_code == 404
