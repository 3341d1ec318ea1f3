"""The site's policy: decides before every message whether the site may process it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from datetime import datetime

from pipeline.core.errors import HemofedError
from pipeline.protocol.messages import SECURE_AGGREGATION_TASKS
from pipeline.study.offer import StudyOffer
from pipeline.study.schema import Study
from sites.governance.approvals import check_approval
from sites.governance.home import SiteHome
from sites.governance.offers import offered_study
from sites.governance.settings import SiteSettings

DESCRIBE_TASK = "describe"  # a summary of the site's data: image shape, classes, numbers of examples
BYTES_PER_GB = 1e9


@dataclass(frozen=True)
class TaskPolicy:
    home: SiteHome
    settings: SiteSettings

    def refusal_reason(self, offer: StudyOffer, task: str, now: datetime | None = None) -> str | None:
        """None if the task is allowed. Reads new ledger entries, so that a revocation takes effect at the next message."""
        try:
            approval = check_approval(self.home, offer, now)
            if not approval.is_approved:
                return approval.reason
            if task not in (allowed_task_names := allowed_tasks(offered_study(offer))):
                return f"{offer.run} has no task {task!r}; allowed tasks: {', '.join(sorted(allowed_task_names))}"
        except HemofedError as error:
            return str(error)
        return self._disk_space_refusal()

    def _disk_space_refusal(self) -> str | None:
        free_gb = shutil.disk_usage(self.home.path).free / BYTES_PER_GB
        required_gb = self.settings.limits.min_free_disk_gb
        if free_gb >= required_gb:
            return None
        return (
            f"{self.home.path} has {free_gb:.1f} GB left, and {required_gb:g} must stay free; make room, or lower "
            "limits.min_free_disk_gb in site.toml"
        )


def allowed_tasks(study: Study) -> frozenset[str]:
    secure_aggregation_tasks = SECURE_AGGREGATION_TASKS if study.privacy.secure_aggregation else frozenset()
    return study.strategy.tasks | {DESCRIBE_TASK} | secure_aggregation_tasks
