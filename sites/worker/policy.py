"""Asked before every message: may this site work on it now, and if not, why not."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from datetime import datetime

from pipeline.core.errors import HemofedError
from pipeline.study.offer import StudyOffer
from pipeline.study.schema import Study
from sites.governance.approvals import check_approval
from sites.governance.home import SiteHome
from sites.governance.offers import offered_study
from sites.governance.settings import SiteSettings

ABOUT_TASK = "about"  # what a site has: the shape of its images, the classes, and how many
BYTES_PER_GB = 1e9


@dataclass(frozen=True)
class TaskPolicy:
    home: SiteHome
    settings: SiteSettings

    def refusal_reason(self, offer: StudyOffer, task: str, now: datetime | None = None) -> str | None:
        """None if it may. Reads the ledger's end each time, so that a withdrawal takes effect at the next message."""
        try:
            approval = check_approval(self.home, offer, now)
            if not approval.is_approved:
                return approval.reason
            if task not in (allowed_task_names := allowed_tasks(offered_study(offer))):
                return f"{offer.run} has no task {task!r}; approved are {', '.join(sorted(allowed_task_names))}"
        except HemofedError as error:
            return str(error)
        return self._disk_space_refusal()

    def _disk_space_refusal(self) -> str | None:
        free_gb, required_gb = (
            shutil.disk_usage(self.home.path).free / BYTES_PER_GB,
            self.settings.limits.min_free_disk_gb,
        )
        if free_gb >= required_gb:
            return None
        return (
            f"{self.home.path} has {free_gb:.1f} GB left, and {required_gb:g} must stay free; make room, or lower limits.disk_gb "
            "in site.toml"
        )


def allowed_tasks(study: Study) -> frozenset[str]:
    from sites.privacy.secure_agg_client import SECURE_AGGREGATION_TASKS as MASKING

    return study.strategy.tasks | {ABOUT_TASK} | (MASKING if study.privacy.secure_aggregation else frozenset())
