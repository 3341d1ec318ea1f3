"""Which files of a run may be downloaded, and by whom."""

import math

import pytest

from pipeline.records.round_record import write_round_records
from tests.support.run_folder_factory import make_record, make_results
from tests.support.service_factory import make_heartbeat


def make_evaluated_record(round_number, **fields):
    metrics = {"val": {"pooled": {"n": 10, "accuracy": 0.5 + round_number / 10}}}
    return make_record(round_number, metrics=metrics, **fields)


@pytest.fixture
def finished_run(service):
    """A finished run of three sites in two clusters; two of the sites have approved it."""
    sites = {name: service.enrol_site(name) for name in ("a", "b", "c")}
    run = service.offer_run()
    for name in ("a", "b"):
        sites[name].post("/site/heartbeat", make_heartbeat(service.make_approval(run)))
    clusters = {"a": "0", "b": "1", "c": "1"}
    records = [make_evaluated_record(0), make_evaluated_record(1, clusters=clusters), make_evaluated_record(2)]
    write_round_records(service.home.runs_folder / run, records)
    for name in ("global", "cluster/0", "cluster/1", "site/a", "site/b"):
        service.write_run_file(run, f"models/{name}.safetensors", name.encode())
    service.write_run_file(run, "report.html", b"<p>report")
    service.write_run_file(run, "plots/curve.png")
    service.write_run_file(run, "cells/patient.png")
    service.write_run_file(run, "checkpoint/round-2.safetensors")
    test = {"pooled": {"n": 10, "accuracy": 0.9, "loss": math.nan}}
    make_results(test=test).write(service.home.runs_folder / run)
    service.store.set_run_state(run, "finished")
    return run, sites


def test_rounds_results_and_headline(service, finished_run):
    run, _ = finished_run
    assert [r["round"] for r in service.lead.get(f"/api/runs/{run}/rounds").json()] == [0, 1, 2]
    assert [r["round"] for r in service.lead.get(f"/api/runs/{run}/rounds?after=1").json()] == [2]
    assert service.lead.get(f"/api/runs/{run}/rounds?after=x").status_code == 422
    assert service.lead.get(f"/api/runs/{run}/results").json()["test"]["pooled"]["loss"] is None  # JSON has no NaN
    assert service.lead.get(f"/api/runs/{run}/privacy").status_code == 404
    run_view = service.lead.get(f"/api/runs/{run}").json()
    assert (run_view["round"], run_view["headline"]) == (2, {"split": "test", "metric": "accuracy", "value": 0.9})
    (service.home.runs_folder / run / "results.json").unlink()
    assert service.lead.get(f"/api/runs/{run}").json()["headline"] == {
        "split": "val",
        "metric": "accuracy",
        "value": 0.7,
    }


def test_incomplete_round_record_is_not_sent(service, finished_run):
    run, _ = finished_run
    with (service.home.runs_folder / run / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "met')
    assert [r["round"] for r in service.lead.get(f"/api/runs/{run}/rounds").json()] == [0, 1, 2]


def test_list_of_downloadable_files(service, finished_run):
    run, _ = finished_run
    listed = {f["path"]: f for f in service.add_user("viewer").get(f"/api/runs/{run}/files").json()}
    assert set(listed) == {
        "models/global.safetensors",
        "models/cluster/0.safetensors",
        "models/cluster/1.safetensors",
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
def test_unlisted_file_is_not_sent(service, finished_run, path):
    run, _ = finished_run
    (service.home.runs_folder / run / "plots" / "link.png").symlink_to(service.home.token_path)
    response = service.lead.get(f"/api/runs/{run}/files/{path}")
    if path == "":
        assert response.status_code in (307, 404)
    else:
        assert response.status_code == 404
    assert service.lead_token not in response.text


def test_report_opens_in_a_sandbox_and_other_files_are_saved(service, finished_run):
    run, _ = finished_run
    page = service.lead.get(f"/api/runs/{run}/files/report.html")
    assert page.headers["content-type"].startswith("text/html")
    assert "sandbox" in page.headers["content-security-policy"]
    assert "script-src" not in page.headers["content-security-policy"]
    assert page.headers["content-disposition"].startswith("inline")
    model = service.lead.get(f"/api/runs/{run}/files/models/global.safetensors")
    assert model.headers["content-disposition"].startswith("attachment")
    assert page.headers["cache-control"] == model.headers["cache-control"] == "no-store"


def test_site_gets_the_global_model_and_that_of_its_cluster(service, finished_run):
    run, sites = finished_run
    (response,) = sites["a"].post("/site/heartbeat", make_heartbeat()).json()["runs"]
    assert response == {"id": run, "state": "finished", "models": ["global", "cluster/0"]}
    assert sites["a"].get(f"/site/runs/{run}/models/global").content == b"global"
    assert sites["a"].get(f"/site/runs/{run}/models/cluster/0").content == b"cluster/0"
    assert sites["b"].get(f"/site/runs/{run}/models/cluster/1").content == b"cluster/1"


@pytest.mark.parametrize(
    "name",
    [
        "cluster/1",
        "site/a",
        "site/b",
        "cluster/..%2fsite%2fb",
        "..%2f..%2f..%2flead.token",
        "%2e%2e/checkpoint/round-2",
        "nothing",
        "global.safetensors",
        "global%00",
        "Global",
    ],
)
def test_site_gets_no_other_model(service, finished_run, name):
    run, sites = finished_run
    assert sites["a"].get(f"/site/runs/{run}/models/{name}").status_code == 404


def test_site_without_approval_gets_no_model(service, finished_run):
    run, sites = finished_run
    (response,) = sites["c"].post("/site/heartbeat", make_heartbeat()).json()["runs"]
    assert response["models"] == []
    assert sites["c"].get(f"/site/runs/{run}/models/global").status_code == 404


def test_site_outside_the_run_gets_nothing(service, finished_run):
    run, _ = finished_run
    other_site = service.enrol_site("d")
    assert other_site.post("/site/heartbeat", make_heartbeat()).json()["runs"] == []
    assert other_site.get(f"/site/runs/{run}/models/global").status_code == 404
