"""Asked before every message: may this site work on it now, and if not, why not."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from datetime import datetime

from pipeline.core.errors import HemofedError
from pipeline.study.offer import Offer
from pipeline.study.schema import Study
from sites.governance.approvals import standing
from sites.governance.home import Home
from sites.governance.offers import study_of
from sites.governance.settings import Settings

ABOUT = "about"  # what a site has: the shape of its images, the classes, and how many
GB = 1e9


@dataclass(frozen=True)
class Policy:
    home: Home
    settings: Settings

    def permits(self, offer: Offer, task: str, now: datetime | None = None) -> str | None:
        """None if it may. Reads the ledger's end each time, so that a withdrawal takes effect at the next message."""
        try:
            verdict = standing(self.home, offer, now)
            if not verdict.ok:
                return verdict.reason
            if task not in (known := tasks_of(study_of(offer))):
                return f"{offer.run} has no task {task!r}; approved are {', '.join(sorted(known))}"
        except HemofedError as error:
            return str(error)
        return self._too_full()

    def _too_full(self) -> str | None:
        free, wanted = shutil.disk_usage(self.home.path).free / GB, self.settings.limits.disk_gb
        if free >= wanted:
            return None
        return (
            f"{self.home.path} has {free:.1f} GB left, and {wanted:g} must stay free; make room, or lower limits.disk_gb "
            "in site.toml"
        )


def tasks_of(study: Study) -> frozenset[str]:
    from sites.privacy.secure_agg_client import TASKS as MASKING

    return study.strategy.tasks | {ABOUT} | (MASKING if study.privacy.secure_sum else frozenset())
