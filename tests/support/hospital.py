"""A hospital with an officer, a coordinator that it belongs to, and studies that are offered to it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pipeline.study.offer import Offer, offer
from pipeline.study.schema import Study, load_study
from pipeline.study.toml_file import find_study
from privacy.ledger.keys import generate, public_hex, save
from privacy.ledger.records import Budget
from sites.governance.approvals import approve
from sites.governance.home import Home
from sites.governance.settings import Limits, Settings

SITE = "st-anne"
SOON = timedelta(days=30)
ROOMY = Settings(limits=Limits(disk_gb=1e-6))


def now() -> datetime:
    return datetime.now(UTC)


@dataclass
class Hospital:
    folder: Path
    officer: Ed25519PrivateKey = field(default_factory=generate)
    coordinator: Ed25519PrivateKey = field(default_factory=generate)
    other: Ed25519PrivateKey = field(default_factory=generate)  # another site's agent

    def __post_init__(self) -> None:
        Home.create(self.path, SITE, "smears-2024", "patient", Budget(epsilon=8.0, delta=1e-5), self.officer)
        self.join(self.coordinator)
        save(self.officer, self.folder / "officer.pem")

    @property
    def path(self) -> Path:
        return self.folder / "home"

    @property
    def home(self) -> Home:
        """As another process would open it."""
        return Home.open(self.path)

    def join(self, coordinator: Ed25519PrivateKey) -> None:
        member = {"coordinator": {"name": "north", "key": public_hex(coordinator)}}
        (self.path / "membership.json").write_text(json.dumps(member))

    def offer(self, study: Study | str = "moons-demo", run: str = "run-1", **more) -> Offer:
        """`more`: overrides of the study."""
        plan = load_study(find_study(study), more) if isinstance(study, str) else study
        sites = {"charite": public_hex(self.other), SITE: public_hex(self.home.key)}
        return offer(run, plan, sites, public_hex(self.coordinator))

    def lay(self, made: Offer) -> Offer:
        """Where the agent puts what it was offered."""
        (self.path / "offers").mkdir(exist_ok=True)
        (self.path / "offers" / f"{made.digest}.json").write_text(made.model_dump_json())
        return made

    def approve(self, made: Offer, until: timedelta = SOON, second: Ed25519PrivateKey | None = None) -> None:
        approve(self.home, made, self.officer, now() + until, second)
