"""The privacy of one run at one site, as its task sessions use it."""

from __future__ import annotations

from dataclasses import dataclass

from sites.privacy.budget_guard import BudgetGuard
from sites.privacy.plan import PrivacyPlan
from sites.privacy.update_masking import UpdateMasker


@dataclass(frozen=True)
class SitePrivacy:
    """Both parts are optional: `budget_guard` charges private training, `update_masker` hides the update in a sum."""

    budget_guard: BudgetGuard | None = None
    update_masker: UpdateMasker | None = None

    @property
    def privacy_plan(self) -> PrivacyPlan | None:
        return self.budget_guard.privacy_plan if self.budget_guard is not None else None
