"""A hospital with an officer, a coordinator that it belongs to, and studies that are offered to it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pipeline.study.offer import StudyOffer, create_offer
from pipeline.study.schema import Study, load_study
from pipeline.study.toml_file import find_study
from privacy.ledger.keys import generate_key, public_hex, save_key
from privacy.ledger.records import LedgerBudget
from sites.governance.approvals import approve_offer
from sites.governance.home import SiteHome
from sites.governance.settings import ResourceLimits, SiteSettings

SITE = "st-anne"
SOON = timedelta(days=30)
ROOMY = SiteSettings(limits=ResourceLimits(min_free_disk_gb=1e-6))


def now() -> datetime:
    return datetime.now(UTC)


@dataclass
class Hospital:
    folder: Path
    officer: Ed25519PrivateKey = field(default_factory=generate_key)
    coordinator: Ed25519PrivateKey = field(default_factory=generate_key)
    other: Ed25519PrivateKey = field(default_factory=generate_key)  # another site's agent

    def __post_init__(self) -> None:
        SiteHome.create(self.path, SITE, "smears-2024", "patient", LedgerBudget(epsilon=8.0, delta=1e-5), self.officer)
        self.join(self.coordinator)
        save_key(self.officer, self.folder / "officer.pem")

    @property
    def path(self) -> Path:
        return self.folder / "home"

    @property
    def home(self) -> SiteHome:
        """As another process would open it."""
        return SiteHome.open(self.path)

    def join(self, coordinator: Ed25519PrivateKey) -> None:
        member = {"coordinator": {"name": "north", "key": public_hex(coordinator)}}
        (self.path / "membership.json").write_text(json.dumps(member))

    def offer(self, study: Study | str = "moons-demo", run: str = "run-1", **more) -> StudyOffer:
        """`more`: overrides of the study."""
        plan = load_study(find_study(study), more) if isinstance(study, str) else study
        sites = {"charite": public_hex(self.other), SITE: public_hex(self.home.agent_key)}
        return create_offer(run, plan, sites, public_hex(self.coordinator))

    def lay(self, made: StudyOffer) -> StudyOffer:
        """Where the agent puts what it was offered."""
        (self.path / "offers").mkdir(exist_ok=True)
        (self.path / "offers" / f"{made.digest}.json").write_text(made.model_dump_json())
        return made

    def approve(self, made: StudyOffer, until: timedelta = SOON, second: Ed25519PrivateKey | None = None) -> None:
        approve_offer(self.home, made, self.officer, now() + until, second)
