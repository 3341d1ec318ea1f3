"""Asks the site's ledger before private work: charge, let the coordinator countersign, and only then train."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.coordinator.checkpoint import load_tensors, save_tensors
from pipeline.core.errors import BadLedger, BadRun, HemofedError
from pipeline.protocol.messages import BUDGET, Memory, Message, Update
from pipeline.protocol.tasks import Work
from privacy.accounting.accountant import Event
from privacy.accounting.privacy_filter import Budget, Commitment, decide
from privacy.ledger.ledger import Ledger
from privacy.ledger.receipts import Request, check_receipt, request
from privacy.ledger.records import Charge, Commit, Receipt, Refusal
from sites.governance.home import Home
from sites.privacy.plan import Promise

MECHANISM = "DP-SGD: Poisson-sampled units, clipped, Gaussian noise"
Countersign = Callable[[Request], Receipt]


@dataclass
class Guard:
    home: Home
    promise: Promise
    study: str
    plan: str  # hash
    countersign: Countersign
    coordinator: str  # its public key

    def charge(self, message: Message, steps: int) -> str | None:
        """Pays for so many steps of this turn; why the site sits out, if it does."""
        if not steps:
            return None
        ledger, terms = self.home.ledger, self.promise.terms
        try:
            self._have_receipt()  # of a charge that a crash left without one
        except HemofedError as error:
            return f"no receipt, no training: {error}"
        self._commit()
        wanted = (self.plan, Event(terms.noise, terms.rate, steps))
        decision = decide(history(ledger), commitments(ledger), wanted, allowance(ledger))
        if not decision.allowed:
            ledger.append(Refusal(study=self.study, turn=message.turn, reason=decision.reason))
            return f"{BUDGET}: {decision.reason}"
        try:
            ledger.append(
                Charge(
                    study=self.study, plan=self.plan, turn=message.turn, attempt=message.attempt, nth=0,
                    mechanism=MECHANISM, noise=terms.noise, rate=terms.rate, steps=steps, unit=terms.unit,
                    epsilon=decision.epsilon_after, delta=ledger.budget.delta, accountant=decision.how,
                )
            )  # fmt: skip
            self._have_receipt()
        except BadLedger as error:  # also where another process has charged in between
            return f"no receipt, no training: {error}"
        return None

    def _have_receipt(self) -> None:
        ledger = self.home.ledger
        charged = max((entry.index for entry in ledger.entries("charge")), default=-1)
        if charged <= max((receipt.index for receipt in ledger.standing.receipts), default=-1):
            return
        try:
            receipt = self.countersign(request(ledger, self.home.key, self.coordinator))
        except BadLedger:  # a coordinator that was restored from a backup has to see more than the news
            receipt = self.countersign(request(ledger, self.home.key, self.coordinator, since=0))
        check_receipt(receipt, ledger, self.coordinator)
        ledger.append(receipt)

    def _commit(self) -> None:
        if any(isinstance(e.what, Commit) and e.what.plan == self.plan for e in self.home.ledger.entries("commit")):
            return
        p, t = self.promise, self.promise.terms
        self.home.ledger.append(
            Commit(
                study=self.study, plan=self.plan, mechanism=MECHANISM, noise=t.noise, rate=t.rate,
                steps_per_turn=p.steps, turns=p.turns, clip=t.clip, unit=t.unit, delta=p.delta, epsilon=p.epsilon,
            )
        )  # fmt: skip

    def stored(self, message: Message) -> tuple[Update, Memory] | None:
        """The answer that was already made, and paid for, to the same question."""
        if not self.home.outbox.is_file():
            return None
        try:
            header, tensors = load_tensors(self.home.outbox)
        except BadRun:
            return None
        if header["question"] != self._question(message):
            return None
        parts = {
            kind: {k.partition("/")[2]: v for k, v in tensors.items() if k.startswith(f"{kind}/")}
            for kind in ("mean", "sum", "memory")
        }
        work = Work(**header["work"]) if header["work"] else None
        return Update(parts["mean"], parts["sum"], work, header["group"]), parts["memory"]

    def store(self, message: Message, update: Update, memory: Memory) -> None:
        kinds = (("mean", update.mean), ("sum", update.sum), ("memory", memory))
        tensors = {f"{kind}/{key}": value for kind, vectors in kinds for key, value in vectors.items()}
        header = {
            "question": self._question(message),
            "group": update.group,
            "work": None if update.work is None else vars(update.work),
        }
        save_tensors(self.home.outbox, header, tensors)

    def _question(self, message: Message) -> str:
        """What is asked, whichever attempt it is."""
        digest = hashlib.sha256(f"{self.plan} {message.task} {message.turn}".encode())
        for key in sorted(message.vectors):
            digest.update(key.encode())
            digest.update(message.vectors[key].contiguous().numpy().tobytes())
        return digest.hexdigest()


def allowance(ledger: Ledger) -> Budget:
    return Budget(ledger.budget.epsilon, ledger.budget.delta, first=ledger.standing.opening.budget.epsilon)


def commitments(ledger: Ledger) -> dict[str, Commitment]:
    """Of this ledger's plans; those that an earlier ledger carried over are bound to what they did."""
    found: dict[str, Commitment] = {}
    charges = ledger.spent_events()
    for plan in {charge.plan for charge in charges}:
        own = [charge for charge in charges if charge.plan == plan]
        found[plan] = Commitment(plan, own[0].noise, own[0].rate, max(c.steps for c in own), len(own))
    for entry in ledger.entries("commit"):
        if isinstance(c := entry.what, Commit):
            found[c.plan] = Commitment(c.plan, c.noise, c.rate, c.steps_per_turn, c.turns)
    return found


def history(ledger: Ledger) -> list[tuple[str, Event]]:
    return [(c.plan, Event(c.noise, c.rate, c.steps)) for c in ledger.spent_events()]
