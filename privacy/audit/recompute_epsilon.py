"""Recomputes epsilon from a ledger's charges, with the ledger's rule and with other accountants.

The other accountants are Rényi divergences by Opacus, privacy loss distributions, and Rényi divergences by
dp_accounting, which shares no code with Opacus. The series of the two Rényi accountants fail to converge at different
orders, which may change epsilon by 0.5 %.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant

from pipeline.core.errors import BudgetError
from privacy.accounting.accountant import RDP_ORDERS, DpEvent, compute_epsilon, merge_events
from privacy.accounting.privacy_filter import FilterBudget, PlannedSpending, compute_spent
from privacy.audit.facts import EpsilonByAccountant, RecomputedEpsilon
from privacy.ledger.entry import LedgerEntry
from privacy.ledger.records import CarriedCharges, LedgerBudget, PrivacyCharge, StudyCommitment
from privacy.ledger.summary import list_charges

SAME_RULE_TOLERANCE = 1e-3  # relative
OTHER_ACCOUNTANT_TOLERANCE = 1e-2  # relative, for another implementation of the same accountant


def dp_events_of(charges: Iterable[PrivacyCharge]) -> list[DpEvent]:
    return [DpEvent(charge.noise_multiplier, charge.sampling_rate, charge.steps) for charge in charges]


def dp_accounting_epsilon(events: Iterable[DpEvent], delta: float) -> float:
    """Epsilon by dp_accounting's Rényi accountant."""
    accountant = RdpAccountant([float(order) for order in RDP_ORDERS], NeighboringRelation.ADD_OR_REMOVE_ONE)
    with _silence_logging():
        for event in merge_events(events):
            if event.noise_multiplier == 0:
                return math.inf
            accountant.compose(
                PoissonSampledDpEvent(event.sampling_rate, GaussianDpEvent(event.noise_multiplier)), event.steps
            )
        return float(accountant.get_epsilon(delta))


def epsilon_by_accountant(events: Sequence[DpEvent], delta: float) -> EpsilonByAccountant:
    return EpsilonByAccountant(
        rdp=compute_epsilon(events, delta, "rdp"),
        pld=compute_epsilon(events, delta, "pld"),
        dp_accounting=dp_accounting_epsilon(events, delta),
    )


def recompute_epsilon(
    entries: Sequence[LedgerEntry], initial_budget: LedgerBudget, current_budget: LedgerBudget, ledger_epsilon: float
) -> RecomputedEpsilon:
    """`initial_budget`: of the `opened` record; `ledger_epsilon`: the epsilon that the ledger states."""
    charges = list_charges(entries)
    events = dp_events_of(charges)
    by_accountant = epsilon_by_accountant(events, current_budget.delta)
    history = [(charge.study_hash, event) for charge, event in zip(charges, events, strict=True)]
    problems: list[str] = []
    recomputed = None
    try:
        recomputed = compute_spent(
            history,
            planned_spending_by_study(entries),
            FilterBudget(current_budget.epsilon, current_budget.delta, initial_budget.epsilon),
        )
        if not are_epsilons_equal(recomputed.epsilon, ledger_epsilon, SAME_RULE_TOLERANCE):
            problems.append(
                f"the ledger states epsilon {ledger_epsilon:.4f}, but its charges add up to {recomputed.epsilon:.4f}"
            )
    except BudgetError as error:
        problems.append(str(error))
    if not do_implementations_agree(by_accountant):
        problems.append(
            f"two implementations give different results: epsilon {by_accountant.rdp:.4f} by Opacus, "
            f"{by_accountant.dp_accounting:.4f} by dp_accounting"
        )
    return RecomputedEpsilon(
        by_accountant=by_accountant,
        epsilon=recomputed and recomputed.epsilon,
        accountant=recomputed and recomputed.accountant,
        problems=tuple(problems),
    )


def do_implementations_agree(by_accountant: EpsilonByAccountant) -> bool:
    return are_epsilons_equal(by_accountant.rdp, by_accountant.dp_accounting, OTHER_ACCOUNTANT_TOLERANCE)


def are_epsilons_equal(epsilon: float, other_epsilon: float, tolerance: float) -> bool:
    return epsilon == other_epsilon or math.isclose(epsilon, other_epsilon, rel_tol=tolerance, abs_tol=1e-6)


def planned_spending_by_study(entries: Sequence[LedgerEntry]) -> Mapping[str, PlannedSpending]:
    """The commitments, by study hash. The plan of a study carried over from an earlier ledger is what it charged there."""
    planned: dict[str, PlannedSpending] = {}
    for record in (entry.record for entry in entries if entry.kind in (CarriedCharges.kind, StudyCommitment.kind)):
        if isinstance(record, StudyCommitment):
            planned[record.study_hash] = PlannedSpending(
                record.study_hash,
                record.noise_multiplier,
                record.sampling_rate,
                record.steps_per_round,
                record.max_participations,
            )
        elif isinstance(record, CarriedCharges):
            for study_hash in {charge.study_hash for charge in record.charges}:
                study_charges = [charge for charge in record.charges if charge.study_hash == study_hash]
                max_steps = max(charge.steps for charge in study_charges)
                planned[study_hash] = PlannedSpending(
                    study_hash,
                    study_charges[0].noise_multiplier,
                    study_charges[0].sampling_rate,
                    max_steps,
                    len(study_charges),
                )
    return planned


@contextmanager
def _silence_logging() -> Iterator[None]:
    """dp_accounting logs every order at which a series does not converge."""
    previous_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(previous_level)
