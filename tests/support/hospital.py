"""A hospital with an officer, a coordinator that it has joined, and offers of studies to it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pipeline.study.offer import StudyOffer, create_offer
from pipeline.study.schema import Study
from pipeline.study.toml_file import find_study, load_study
from privacy.ledger.keys import generate_key, public_hex, save_key
from privacy.ledger.records import LedgerBudget
from sites.governance.approvals import approve_offer
from sites.governance.home import SiteHome
from sites.governance.settings import ResourceLimits, SiteSettings

SITE = "st-anne"
VALIDITY = timedelta(days=30)  # of an approval
SETTINGS = SiteSettings(limits=ResourceLimits(min_free_disk_gb=1e-6))


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass
class Hospital:
    """Creates HOME in `folder` and keeps the private keys of everybody involved."""

    folder: Path
    officer: Ed25519PrivateKey = field(default_factory=generate_key)
    coordinator: Ed25519PrivateKey = field(default_factory=generate_key)
    other_agent: Ed25519PrivateKey = field(default_factory=generate_key)  # of the site charite

    def __post_init__(self) -> None:
        SiteHome.create(self.path, SITE, "smears-2024", "patient", LedgerBudget(epsilon=8.0, delta=1e-5), self.officer)
        self.set_coordinator(self.coordinator)
        save_key(self.officer, self.folder / "officer.pem")

    @property
    def path(self) -> Path:
        return self.folder / "home"

    @property
    def home(self) -> SiteHome:
        """Opens the home again, as another process does."""
        return SiteHome.open(self.path)

    def set_coordinator(self, key: Ed25519PrivateKey) -> None:
        membership = {"coordinator": {"name": "north", "key": public_hex(key)}}
        (self.path / "membership.json").write_text(json.dumps(membership))

    def make_offer(self, study: Study | str = "moons-demo", run: str = "run-1", **overrides) -> StudyOffer:
        """`overrides`: of the study's settings."""
        parsed = load_study(find_study(study), overrides) if isinstance(study, str) else study
        site_keys = {"charite": public_hex(self.other_agent), SITE: public_hex(self.home.agent_key)}
        return create_offer(run, parsed, site_keys, public_hex(self.coordinator))

    def store_offer(self, offer: StudyOffer) -> StudyOffer:
        """Writes the offer to HOME/offers, as the agent does."""
        (self.path / "offers").mkdir(exist_ok=True)
        (self.path / "offers" / f"{offer.digest}.json").write_text(offer.model_dump_json())
        return offer

    def approve(
        self, offer: StudyOffer, validity: timedelta = VALIDITY, cosigner: Ed25519PrivateKey | None = None
    ) -> None:
        approve_offer(self.home, offer, self.officer, utc_now() + validity, cosigner)
