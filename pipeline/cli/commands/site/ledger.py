"""`hemofed site init`, `site ledger`, `site key`, `site budget` and `site forget`: what a site keeps about privacy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pipeline.cli.output import console, print_json, table
from pipeline.cli.passphrases import unlocked
from pipeline.core.errors import BadRun
from pipeline.study.offer import SITE_NAME
from privacy.ledger import keys
from privacy.ledger.countersigner import Known
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import (
    Approve,
    Body,
    Budget,
    Charge,
    Commit,
    Data,
    Forget,
    Open,
    Policy,
    Receipt,
    Refusal,
    Rotate,
    Withdraw,
)
from privacy.ledger.verify import export, verify
from sites.governance.home import Home
from sites.governance.settings import Limits, Settings


def init_command(
    home: Path,
    site: str,
    dataset: str,
    unit: str,
    epsilon: float,
    delta: float,
    data: Path | None,
    plays: str | None,
    officer: Path | None,
    json: bool,
) -> None:
    if not re.match(SITE_NAME, site):
        raise BadRun(
            f"a site cannot be called {site!r}: up to 48 letters, digits, dashes and underscores, a letter first"
        )
    if data is not None and not data.exists():
        raise BadRun(f"{data} is not there; name the folder of the site's images, or leave --data out")
    made = Home.create(
        home, site, dataset, unit, Budget(epsilon=epsilon, delta=delta), None if officer is None else unlocked(officer)
    )
    limits = Limits(disk_gb=0.1) if plays else Limits()  # a rehearsal keeps next to nothing
    Settings(data=data and data.resolve(), plays=plays, limits=limits).save(home)
    about = {"home": str(home), "site": site, "dataset_id": dataset, "fingerprint": keys.fingerprint(keys.public_bytes(made.key))}  # fmt: skip
    if json:
        print_json(about)
        return
    console.print(f"{site}: {home}\nfingerprint of the agent's key: {about['fingerprint']}")
    if officer is None:
        console.print(f"The officer's key was made too: {home / 'officer.pem'}. Let the officer take it away.")


def show_command(home: Path, json: bool) -> None:
    ledger = Ledger.open(_file(home))
    about = summary(ledger)
    if json:
        print_json(about | {"entries": [entry.raw() for entry in ledger.entries()]})
        return
    rows = [[str(e.index), e.time[:19].replace("T", " "), e.kind, words(e.what)] for e in ledger.entries()]
    console.print(table(["", "time (UTC)", "entry", ""], rows, f"{about['site']}: {about['dataset_id']}", words=4))
    console.print(
        f"spent epsilon {about['spent']:.4g} of {about['budget']:g} at delta {about['delta']:g} per {about['unit']}; "
        f"left {about['left']:.4g}"
    )


def summary(ledger: Ledger) -> dict[str, Any]:
    """Spent as the ledger says; what is left for the plans so far."""
    from privacy.accounting.privacy_filter import spent
    from sites.privacy.budget_guard import allowance, commitments, history  # they bring torch along

    opening = ledger.standing.opening
    now = spent(history(ledger), commitments(ledger), allowance(ledger)).epsilon
    return {
        "site": opening.site,
        "dataset_id": opening.dataset_id,
        "unit": opening.unit,
        "budget": ledger.budget.epsilon,
        "delta": ledger.budget.delta,
        "spent": now,
        "left": max(0.0, ledger.budget.epsilon - now),
        "forgotten": len(ledger.entries("forget")),
    }


def words(body: Body) -> str:
    """One line of an entry."""
    match body:
        case Open():
            return f"{body.site}, {body.dataset_id}: epsilon {body.budget.epsilon:g}, delta {body.budget.delta:g} per {body.unit}"
        case Data():
            return f"{body.examples} examples of {body.units} units, fingerprint {body.fingerprint[:12]}"
        case Commit():
            return f"{body.study}: at most {body.turns} turns of {body.steps_per_turn} steps, noise {body.noise:.4g}, rate {body.rate:.4g}: epsilon {body.epsilon:.4g}"
        case Charge():
            again = f", attempt {body.attempt + 1}" if body.attempt else ""
            return f"{body.study}, turn {body.turn}{again}: {body.steps} steps; spent in all {body.epsilon:.4g} ({body.accountant})"
        case Receipt():
            return f"the coordinator has seen entry {body.index}"
        case Refusal():
            return f"{body.study}, turn {body.turn}: {body.reason}"
        case Forget():
            return f"{body.unit[:12]}… withdrew" + (f": {body.reason}" if body.reason else "")
        case Budget():
            return f"now epsilon {body.epsilon:g}, delta {body.delta:g}"
        case Rotate():
            return f"the agent's new key is {keys.fingerprint(bytes.fromhex(body.agent))} ({body.reason})"
        case Approve() | Withdraw():
            end = f" until {str(body.terms['expires'])[:10]}" if "expires" in body.terms else ""
            return f"{body.terms.get('run', body.plan[:12])}{end}"
        case Policy():
            return f"second person: {keys.fingerprint(bytes.fromhex(body.second)) if body.second else 'none'}"
        case _:
            return ", ".join(f"{k}: {v}" for k, v in body.model_dump(mode="json").items() if v)


def verify_command(ledger: Path, anchor: Path | None, json: bool) -> None:
    """`anchor`: the folder of receipts that the coordinator holds."""
    held = None if anchor is None else _last_receipt(_file(ledger), anchor)
    verdict = verify(_file(ledger), held)
    problems = [str(problem) for problem in verdict.problems]
    if json:
        print_json({"ok": verdict.ok, "problems": problems, "entries": len(verdict.entries)})
    else:
        for problem in problems:
            console.print(problem, style="red")
        if verdict.ok:
            against = "" if held else "; without --anchor nobody can tell whether its end was cut off"
            console.print(f"{len(verdict.entries)} entries: all chained and signed{against}")
    if not verdict.ok:
        raise BadRun(f"{ledger} cannot be believed: {len(problems)} problem(s)")


def _last_receipt(ledger: Path, folder: Path) -> Receipt:
    opening = verify(ledger).standing
    known = [Known.model_validate_json(file.read_bytes()).receipt for file in sorted(folder.glob("*.json"))]
    if opening is not None:
        for receipt in known:
            if (receipt.site, receipt.dataset_id) == (opening.opening.site, opening.opening.dataset_id):
                return receipt
    raise BadRun(f"{folder} holds no receipt of {ledger}; is it the coordinator's folder of receipts?")


def export_command(ledger: Path, out: Path) -> None:
    console.print(f"written: {export(_file(ledger), out)}", soft_wrap=True)


def forget_command(home: Path, patient: str, reason: str, json: bool) -> None:
    own = Home.open(home)
    news = own.forget(patient, reason)
    charged = sorted({charge.study for charge in own.ledger.spent_events()})
    if json:
        print_json({"news": news, "trained": charged})
        return
    console.print("recorded: from the next run on nothing of this unit is read" if news else "had withdrawn before")
    if charged:
        about = summary(own.ledger)
        console.print(
            f"Models already trained here ({', '.join(charged)}) cannot be made to forget. What they can tell of this "
            f"unit is bounded by epsilon {about['spent']:.4g} at delta {about['delta']:g}, if it was in the training "
            "data. To be rid of that too, withdraw the models or train them anew."
        )
    else:
        console.print("Nothing was trained with a privacy budget here before. Models trained without one hold what they hold.")  # fmt: skip


def rotate_command(home: Path, officer: Path | None) -> None:
    """Routine with the old key; if that is lost, the officer's."""
    path, fresh = home / "agent.pem", keys.generate()
    ledger = Ledger.open(home / "ledger.jsonl", None if officer else keys.load(path))
    ledger.rotate(fresh, _officer(officer))
    path.rename(path.with_suffix(f".before-{ledger.index}.pem")) if path.exists() else None
    keys.save(fresh, path)
    console.print(f"new key: {keys.fingerprint(keys.public_bytes(fresh))}; tell the coordinator by telephone")


def revoke_command(home: Path, officer: Path, after: int, reason: str) -> None:
    Ledger.open(home / "ledger.jsonl").revoke(unlocked(officer), after, reason)
    console.print("revoked; go on with: hemofed site key rotate HOME --officer KEY")


def budget_command(home: Path, epsilon: float, delta: float | None, officer: Path) -> None:
    own = Home.open(home)
    own.ledger.append(Budget(epsilon=epsilon, delta=delta or own.ledger.budget.delta), unlocked(officer))
    console.print(f"budget: epsilon {epsilon:g}")


def _officer(path: Path | None) -> Ed25519PrivateKey | None:
    return None if path is None else unlocked(path)


def _file(given: Path) -> Path:
    """A home, or a ledger or an export itself."""
    return given / "ledger.jsonl" if given.is_dir() else given
