"""Epsilon once more, from a ledger's charges alone, and by others than those who wrote the ledger.

The ledger's own rule is repeated. Beside it stand Rényi divergences as Opacus has them, privacy loss distributions, and
Rényi divergences as dp_accounting has them, which shares no code with Opacus. The orders at which their series do not
converge differ, which may cost half a percent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant

from pipeline.core.errors import BadBudget
from privacy.accounting.accountant import ORDERS, Event, epsilon, merged
from privacy.accounting.privacy_filter import Budget as Allowance
from privacy.accounting.privacy_filter import Commitment, spent
from privacy.ledger.entry import Entry
from privacy.ledger.records import Budget, Carried, Charge, Commit
from privacy.ledger.summary import charges

SAME, OTHERS = 1e-3, 1e-2  # relative: the same rule again, and another implementation of it


def events_of(made: Iterable[Charge]) -> list[Event]:
    return [Event(charge.noise, charge.rate, charge.steps) for charge in made]


def outside(events: Iterable[Event], delta: float) -> float:
    """By dp_accounting's Rényi accountant."""
    accountant = RdpAccountant([float(order) for order in ORDERS], NeighboringRelation.ADD_OR_REMOVE_ONE)
    with _quiet():
        for event in merged(events):
            if event.noise == 0:
                return math.inf
            accountant.compose(PoissonSampledDpEvent(event.rate, GaussianDpEvent(event.noise)), event.steps)
        return float(accountant.get_epsilon(delta))


def by_all(events: Sequence[Event], delta: float) -> dict[str, float]:
    """Epsilon by each accountant."""
    return {
        "rdp": epsilon(events, delta, "rdp"),
        "pld": epsilon(events, delta, "pld"),
        "dp_accounting": outside(events, delta),
    }


def recount(entries: Sequence[Entry], first: Budget, now: Budget, told: float) -> dict[str, Any]:
    """`told`: what the ledger says was spent; `first`: the budget it was opened with."""
    made = charges(entries)
    events = events_of(made)
    found: dict[str, Any] = by_all(events, now.delta)
    history = [(charge.plan, event) for charge, event in zip(made, events, strict=True)]
    problems = []
    try:
        again = spent(history, commitments(entries), Allowance(now.epsilon, now.delta, first.epsilon))
        found |= {"again": again.epsilon, "how": again.how}
        if not agree(again.epsilon, told, SAME):
            problems.append(f"the ledger says epsilon {told:.4f}, its charges add up to {again.epsilon:.4f}")
    except BadBudget as error:
        found |= {"again": None, "how": None}
        problems.append(str(error))
    if not agree(found["rdp"], found["dp_accounting"], OTHERS):
        problems.append(
            f"two implementations differ: epsilon {found['rdp']:.4f} by Opacus, {found['dp_accounting']:.4f} by dp_accounting"
        )
    return found | {"problems": problems}


def agree(one: float, other: float, within: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=within, abs_tol=1e-6)


def commitments(entries: Sequence[Entry]) -> Mapping[str, Commitment]:
    """As committed to; plans that an earlier ledger carried over are taken to have kept to theirs."""
    found: dict[str, Commitment] = {}
    for body in (entry.what for entry in entries if entry.kind in ("carried", "commit")):
        if isinstance(body, Commit):
            found[body.plan] = Commitment(body.plan, body.noise, body.rate, body.steps_per_turn, body.turns)
        elif isinstance(body, Carried):
            for plan in {charge.plan for charge in body.charges}:
                own = [charge for charge in body.charges if charge.plan == plan]
                most = max(charge.steps for charge in own)
                found[plan] = Commitment(plan, own[0].noise, own[0].rate, most, len(own))
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """dp_accounting names every order at which a series does not converge."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
