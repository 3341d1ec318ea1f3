"""A study gives the same models simulated and across real processes, up to the order in which floats are added."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.tensor_io import load_tensors
from pipeline.protocol.tasks import JobResult
from pipeline.records.attempt_outcome import AttemptOutcome
from pipeline.runs.simulation import run_simulation
from pipeline.study.schema import Study
from pipeline.study.toml_file import parse_study
from privacy.dpsgd.secure_rng import SecureRandom
from sites.governance.settings import ResourceLimits, SiteSettings
from sites.training.base import TrainRequest
from tests.integration.flare_federation import FlareFederation, start_federation

pytest.importorskip("nvflare")

SITES = ("site-01", "site-02", "site-03")
STUDY = """
name = "agree"
rounds = 3
data = { name = "moons", val = 0.1, points = 420 }
model = "moons_net"
sites = { count = 3, speed = [1.0, 2.0, 8.0] }
local = { lr = 0.1, batch_size = 20 }
trainer = "sequential"
evaluation = { evaluate_at = "sites" }
"""
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {},
    "fedprox-partial": {"strategy": "fedprox", "round.deadline": 5.0, "local.epochs": 2},
    "fedpaq": {"strategy": "fedpaq"},
    "ifca": {"strategy": "ifca"},
    "fedrep": {"strategy": "fedrep"},
    "dp-sgd": {"privacy.dp_sgd.epsilon": 8.0, "privacy.dp_sgd.privacy_unit": "example"},
    "secure-aggregation": {"privacy.secure_aggregation.max_update_norm": 10.0},
}
QUICK = {"dp-sgd", "secure-aggregation"}  # the others run with `make test-all`


def make_seeded_random(site: str) -> Callable[[], SecureRandom]:
    """The same numbers as seeded_rng/sitecustomize.py gives the site's process."""
    num_created = iter(range(10**6))
    return lambda: SecureRandom(hashlib.sha256(f"{SITES.index(site)} {next(num_created)}".encode()).digest())


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlareFederation]:
    limits = ResourceLimits(min_free_disk_gb=0.01)
    env_by_site = {
        site: {"SITE_SEED": str(index), "PYTHONPATH": str(Path(__file__).with_name("seeded_rng"))}
        for index, site in enumerate(SITES)
    }
    settings = {site: SiteSettings(simulated_site=site, limits=limits) for site in SITES}
    with start_federation(tmp_path_factory.mktemp("agree"), settings, env_by_site) as federation:
        yield federation


def simulate_with_seeded_random(study: Study, path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    from sites.training.dp_sgd import DpSgdTrainer

    make_random_by_site = {site: make_seeded_random(site) for site in SITES}
    original_run = DpSgdTrainer.run

    def run_seeded(self: DpSgdTrainer, requests: Sequence[TrainRequest]) -> list[JobResult]:
        results: list[JobResult] = []
        for request in requests:
            self.make_secure_random = make_random_by_site.get(request.site, SecureRandom)
            results += original_run(self, [request])
        return results

    monkeypatch.setattr(DpSgdTrainer, "run", run_seeded)
    folder = RunFolder.create(path, study)
    run_simulation(study, folder)
    return folder


def load_models(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    files = sorted(folder.rglob("*.safetensors"))
    return {str(file.relative_to(folder)): load_tensors(file)[1] for file in files}


def assert_close(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    for key, value in actual.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in OVERRIDES])
def test_simulated_and_flare_engines_agree(
    name: str, federation: FlareFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = parse_study(STUDY, name, OVERRIDES[name])
    offer = federation.offer_study(f"agree-{name}", study)
    assert federation.run_job(offer) == AttemptOutcome(outcome="finished", reason="")
    simulated = simulate_with_seeded_random(study, tmp_path / "simulated", monkeypatch)
    federated = RunFolder.open(federation.home / "runs" / offer.run)
    expected, actual = load_models(simulated.path / "models"), load_models(federated.path / "models")
    personal = {path: tensors for path, tensors in expected.items() if path.startswith("site/")}
    assert actual.keys() == expected.keys() - personal.keys()
    for path, tensors in actual.items():
        assert_close(tensors, expected[path])
    for path, tensors in personal.items():  # a personalized model stays at its site
        own_path = federation.homes[Path(path).stem] / "models" / offer.run / "own.safetensors"
        assert_close(load_tensors(own_path)[1], tensors)
    for a, b in zip(simulated.load_rounds(), federated.load_rounds(), strict=True):
        assert a.round == b.round
        assert sorted(a.accepted) == sorted(b.accepted)
        assert {site: (work.steps_requested, work.steps_done) for site, work in a.work.items()} == {
            site: (work.steps_requested, work.steps_done) for site, work in b.work.items()
        }
    if name == "fedprox-partial":
        works = [work for record in federated.load_rounds() for work in record.work.values()]
        assert any(work.steps_done < work.steps_requested for work in works)
    if name == "dp-sgd":
        assert federated.load_rounds()[-1].epsilon == pytest.approx(simulated.load_rounds()[-1].epsilon)
        assert json.loads((federated.path / "privacy.json").read_text())["dp_sgd"].keys() == set(SITES)
    assert not (federated.path / "cells").exists()  # the report of real sites has no images
