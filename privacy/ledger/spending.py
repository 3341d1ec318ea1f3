"""What the privacy filter needs of a ledger: its budget, the studies' planned spending, and the charges so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from privacy.ledger.records import StudyCommitment

if TYPE_CHECKING:  # the accountants (dp_accounting, scipy) take seconds to import; reading a ledger does not need them
    from privacy.accounting.accountant import DpEvent
    from privacy.accounting.privacy_filter import FilterBudget, PlannedSpending
    from privacy.ledger.ledger import Ledger


def filter_budget(ledger: Ledger) -> FilterBudget:
    from privacy.accounting.privacy_filter import FilterBudget

    return FilterBudget(ledger.budget.epsilon, ledger.budget.delta, initial_epsilon=ledger.state.opening.budget.epsilon)


def planned_spending(ledger: Ledger) -> dict[str, PlannedSpending]:
    """The planned spending of each study hash.

    A study that an earlier ledger carried over is planned as what it has charged there.
    """
    from privacy.accounting.privacy_filter import PlannedSpending

    planned: dict[str, PlannedSpending] = {}
    charges = ledger.list_charges()
    for study_hash in {charge.study_hash for charge in charges}:
        study_charges = [charge for charge in charges if charge.study_hash == study_hash]
        planned[study_hash] = PlannedSpending(
            study_hash,
            study_charges[0].noise_multiplier,
            study_charges[0].sampling_rate,
            max(c.steps for c in study_charges),
            len(study_charges),
        )
    for entry in ledger.entries(StudyCommitment.kind):
        if isinstance(c := entry.record, StudyCommitment):
            planned[c.study_hash] = PlannedSpending(
                c.study_hash, c.noise_multiplier, c.sampling_rate, c.steps_per_round, c.max_participations
            )
    return planned


def charge_history(ledger: Ledger) -> list[tuple[str, DpEvent]]:
    from privacy.accounting.accountant import DpEvent

    return [(c.study_hash, DpEvent(c.noise_multiplier, c.sampling_rate, c.steps)) for c in ledger.list_charges()]
