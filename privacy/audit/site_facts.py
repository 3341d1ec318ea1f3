"""What is known of one site after a run: from its ledger, which is checked, and from the coordinator's record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.core.errors import BadLedger, HemofedError
from pipeline.protocol.messages import BUDGET
from privacy.accounting.accountant import epsilon
from privacy.audit.recompute_epsilon import events_of, recount
from privacy.ledger import keys
from privacy.ledger.countersigner import Known
from privacy.ledger.entry import Entry
from privacy.ledger.records import Approve, Budget, Data, Receipt, Refusal, Withdraw
from privacy.ledger.signatures import show
from privacy.ledger.summary import charges
from privacy.ledger.validation import Standing
from privacy.ledger.verify import Verdict, verify

Json = Mapping[str, Any]
EDGE = 1e-9  # of a budget, for rounding


@dataclass(frozen=True)
class Office:
    """What the coordinator keeps: the last receipt that it gave to each ledger, and its key."""

    receipts: tuple[Receipt, ...] = ()
    key: str | None = None  # public
    problems: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Office:
        found, problems = [], []
        for file in sorted((folder / "receipts").glob("*.json")):
            try:
                found.append(Known.model_validate_json(file.read_bytes()).receipt)
            except ValidationError:
                problems.append(f"the coordinator's {file.name} is damaged; restore its newest copy")
        try:
            key = keys.public_hex(keys.load(folder / "key.pem"))
        except HemofedError:
            key = None  # not here, or not for these eyes
        return cls(tuple(found), key, tuple(problems))

    def anchor(self, standing: Standing | None) -> Receipt | None:
        if standing is None:
            return None
        who = (standing.opening.site, standing.opening.dataset_id)
        return next((r for r in self.receipts if (r.site, r.dataset_id) == who), None)


def site_facts(home: Path, office: Office, plan: str, promise: Json | None, took: Json) -> dict[str, Any]:
    """`promise`: of privacy.json, if the site's training is private; `took`: its part in the rounds."""
    file = home / "ledger.jsonl"
    if not file.is_file():
        problems = ["has no ledger, although its training was promised to be private"] if promise else []
        return {"ledger": None, "promise": promise, "took": took, "problems": problems}
    verdict = _verdict(file, office)
    found: dict[str, Any] = {
        "ledger": _about(verdict, office, home),
        "promise": promise,
        "took": took,
        "problems": [f"its ledger does not verify: {problem}" for problem in verdict.problems],
    }
    if verdict.standing is None:
        return found
    try:
        return _with_spending(found, verdict, verdict.standing, plan)
    except BadLedger as error:
        return found | {"problems": [*found["problems"], f"its ledger cannot be read to its end: {error}"]}


def _verdict(file: Path, office: Office) -> Verdict:
    anchor = office.anchor(verify(file).standing)
    return verify(file, anchor, None if office.key is None else {office.key})


def _about(verdict: Verdict, office: Office, home: Path) -> dict[str, Any]:
    entries, standing, last = verdict.entries, verdict.standing, verdict.last_receipt
    return {
        "ok": verdict.ok,
        "problems": list(verdict.problems),
        "entries": len(entries),
        "head": entries[-1].hash if entries else None,
        "from": entries[0].time if entries else None,
        "to": entries[-1].time if entries else None,
        "anchored": office.anchor(standing) is not None,
        "receipt": last and {"index": last.index, "time": last.time, "key": show(last.key)},
        "unreceipted": len(verdict.unreceipted),
        "agent": standing and show(standing.keys.agent),
        "officer": standing and show(standing.keys.officer),
        "officer_is_here": (home / "officer.pem").exists(),
        "dataset_id": standing and standing.opening.dataset_id,
    }


def _with_spending(found: dict[str, Any], verdict: Verdict, standing: Standing, plan: str) -> dict[str, Any]:
    entries, budget = verdict.entries, standing.budget
    made = charges(entries)
    told = made[-1].epsilon if made else 0.0
    again = recount(entries, standing.opening.budget, budget, told) if made else None
    most = max(told, (again or {}).get("again") or 0.0)
    problems = [*found["problems"], *(again or {}).get("problems", ())]
    if most > budget.epsilon * (1 + EDGE):
        problems.append(f"has spent epsilon {most:.4f} of a budget of {budget.epsilon:g}")
    own = [charge for charge in made if charge.plan == plan]
    if found["promise"] is not None:
        turns = {charge.turn for charge in own}
        if bare := [turn for turn in found["took"]["counted"] if turn not in turns]:
            problems.append(f"took part in {_rounds(bare)} without a charge in its ledger")
        problems += _off_promise(found["promise"], own)
        if (heard := found["took"]["epsilon"] or 0.0) > told * (1 + EDGE):
            problems.append(f"told the coordinator that epsilon {heard:.4f} was spent, and its ledger says {told:.4f}")
    return found | {
        "unit": standing.opening.unit,
        "budget": budget.model_dump() if made or found["promise"] else None,
        "spent": told,
        "left": max(0.0, budget.epsilon - told),
        "before": max((c.epsilon for c in made[: _first(made, plan)]), default=0.0),
        "recount": again,
        "charges": [charge.model_dump(mode="json") for charge in made],
        "curve": _curve(made, plan, budget),
        "studies": {study: sum(c.study == study for c in made) for study in dict.fromkeys(c.study for c in made)},
        "refusals": [body.model_dump() for body in _bodies(entries, Refusal)],
        "approvals": [_decision(e) for e in entries if e.kind in (Approve.kind, Withdraw.kind)],
        "forgotten": sum(entry.kind == "forget" for entry in entries),
        "data": [body.model_dump() for body in _bodies(entries, Data)],
        "problems": problems,
    }


def _bodies(entries: Sequence[Entry], kind: type[Refusal] | type[Data]) -> list[Refusal | Data]:
    return [body for entry in entries if isinstance(body := entry.what, kind)]


def _first(made: Sequence[Any], plan: str) -> int:
    """Where the plan's own charges begin."""
    return next((place for place, charge in enumerate(made) if charge.plan == plan), len(made))


def _curve(made: Sequence[Any], plan: str, budget: Budget) -> list[dict[str, float]]:
    """Spent in all after each of the plan's charges: as the ledger says, and by Rényi divergences alone."""
    return [
        {"turn": c.turn, "epsilon": c.epsilon, "rdp": epsilon(events_of(made[: place + 1]), budget.delta, "rdp")}
        for place, c in enumerate(made)
        if c.plan == plan
    ]


def _off_promise(promise: Json, own: Sequence[Any]) -> list[str]:
    """Charges that are not as privacy.json says."""
    same = all(
        (c.noise, c.rate, c.unit) == (promise["noise"], promise["rate"], promise["unit"])
        and c.steps <= promise["steps"]
        for c in own
    )
    return [] if same else ["was charged for other noise, rates, steps or units than privacy.json promised"]


def _decision(entry: Entry) -> dict[str, Any]:
    who = entry.officer.key if entry.officer else None
    return {"kind": entry.kind, "time": entry.time, "officer": who, **dict(entry.body)}


def part_in(rounds: Sequence[Json], site: str) -> dict[str, Any]:
    """What the coordinator's record says of a site's answers."""
    missed = {int(line["round"]): str(line["missed"][site]) for line in rounds if site in (line.get("missed") or {})}
    looks: dict[str, int] = {}
    for line in rounds:
        for split, seen in (line.get("metrics") or {}).items():
            looks[split] = looks.get(split, 0) + (site in (seen.get("sites") or {}))
    return {
        "asked": [int(line["round"]) for line in rounds if site in (line.get("asked") or ())],
        "counted": [int(line["round"]) for line in rounds if site in (line.get("counted") or ())],
        "missed": {str(turn): reason for turn, reason in missed.items()},
        "sat_out": [turn for turn, reason in missed.items() if reason.startswith(BUDGET)],
        "judged": {split: times for split, times in looks.items() if times},
        "epsilon": max((line["epsilon"][site] for line in rounds if site in (line.get("epsilon") or {})), default=None),
    }


def _rounds(turns: Sequence[int]) -> str:
    shown = ", ".join(map(str, turns[:8])) + (" and more" if len(turns) > 8 else "")
    return f"round{'s' if len(turns) > 1 else ''} {shown}"
