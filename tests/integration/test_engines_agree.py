"""The same study in one process and across real ones gives the same models, up to the order in which floats are added."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.tensor_io import load_tensors
from pipeline.runs.simulation import run_simulation
from pipeline.study.schema import Study
from pipeline.study.toml_file import parse_study
from privacy.dpsgd.secure_rng import SecureRandom
from sites.governance.settings import ResourceLimits, SiteSettings
from tests.integration.flare_federation import Stage, federation

pytest.importorskip("nvflare")

SITES = ("site-01", "site-02", "site-03")
BASE = """
name = "agree"
rounds = 3
data = { name = "moons", val = 0.1, points = 420 }
model = "moons_net"
sites = { count = 3, speed = [1.0, 2.0, 8.0] }
local = { lr = 0.1, batch = 20 }
trainer = "sequential"
evaluation = { where = "sites" }
"""
STUDIES = {
    "fedavg": {},
    "fedprox-partial": {"strategy": "fedprox", "round.deadline": 5.0, "local.epochs": 2},
    "fedpaq": {"strategy": "fedpaq"},
    "ifca": {"strategy": "ifca"},
    "fedrep": {"strategy": "fedrep"},
    "private": {"privacy.dp_sgd.epsilon": 8.0, "privacy.dp_sgd.privacy_unit": "example"},
    "secure-sum": {"privacy.secure_aggregation.max_update_norm": 10.0},
}


def diced(site: str) -> Callable[[], SecureRandom]:
    rolled = iter(range(10**6))
    return lambda: SecureRandom(hashlib.sha256(f"{SITES.index(site)} {next(rolled)}".encode()).digest())


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("agree")
    tight = ResourceLimits(min_free_disk_gb=0.01)
    dice = {
        site: {"DICE": str(n), "PYTHONPATH": str(Path(__file__).with_name("seeded_rng"))}
        for n, site in enumerate(SITES)
    }
    with federation(
        folder, {site: SiteSettings(simulated_site=site, limits=tight) for site in SITES}, extra=dice
    ) as made:
        yield made


def simulated(study: Study, folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    from sites.training.dp_sgd import DpSgdTrainer

    rolls = {site: diced(site) for site in SITES}
    real = DpSgdTrainer.run

    def run_diced(self: DpSgdTrainer, tickets: list) -> list:  # type: ignore[type-arg]
        found = []
        for ticket in tickets:
            self.make_secure_random = rolls.get(ticket.site, SecureRandom)
            found += real(self, [ticket])
        return found

    monkeypatch.setattr(DpSgdTrainer, "run", run_diced)
    made = RunFolder.create(folder, study)
    run_simulation(study, made)
    return made


def models(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    files = sorted(folder.rglob("*.safetensors"))
    return {str(file.relative_to(folder)): load_tensors(file)[1] for file in files}


QUICK = {"private", "secure-sum"}  # the others take `make test-all`


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in STUDIES])
def test_engines_agree(name: str, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = parse_study(BASE, name, STUDIES[name])
    offer = stage.offered(f"agree-{name}", study)
    assert stage.run(offer) == {"how": "finished", "why": ""}
    here = simulated(study, tmp_path / "sim", monkeypatch)
    there = RunFolder.open(stage.home / "runs" / offer.run)
    want, got = models(here.path / "models"), models(there.path / "models")
    own = {name: found for name, found in want.items() if name.startswith("site/")}
    assert got.keys() == want.keys() - own.keys()
    for path, tensors in got.items():
        for key, value in tensors.items():
            torch.testing.assert_close(value, want[path][key], rtol=1e-4, atol=1e-5)
    for path, tensors in own.items():  # a site's own model stays with it
        site = Path(path).stem
        kept = load_tensors(stage.homes[site] / "models" / offer.run / "own.safetensors")[1]
        for key, value in kept.items():
            torch.testing.assert_close(value, tensors[key], rtol=1e-4, atol=1e-5)
    for a, b in zip(here.load_rounds(), there.load_rounds(), strict=True):
        assert a["round"] == b["round"]
        assert sorted(a["counted"]) == sorted(b["counted"])
        assert {s: (w["asked"], w["done"]) for s, w in a["work"].items()} == {
            s: (w["asked"], w["done"]) for s, w in b["work"].items()
        }
    if name == "fedprox-partial":
        assert any(w["done"] < w["asked"] for r in there.load_rounds() for w in r["work"].values())
    if name == "private":
        assert there.load_rounds()[-1]["epsilon"] == pytest.approx(here.load_rounds()[-1]["epsilon"])
        assert json.loads((there.path / "privacy.json").read_text())["dp_sgd"].keys() == set(SITES)
    assert not (there.path / "cells").exists()  # a deployed report has no images
