"""`hemofed site offers`, `site approve`, `site withdraw` and `site policy`: what the officer sees and decides."""

from __future__ import annotations

import re
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import Any

import typer

from pipeline.cli.output import console, print_json, table
from pipeline.cli.passphrases import unlocked
from pipeline.core.errors import BadKey, BadStudy, Refused
from pipeline.study.offer import Offer
from privacy.ledger.keys import public_hex
from privacy.ledger.ledger import utc_now
from privacy.ledger.records import Policy
from privacy.ledger.signatures import consent, show
from sites.governance.approvals import Verdict, approve, standing, withdraw
from sites.governance.home import Home
from sites.governance.offers import offered, offers_in
from sites.governance.study_summary import Words, describe


def offers_command(home: Path, json: bool) -> None:
    own = Home.open(home)
    found = [(offer, standing(own, offer)) for offer in offers_in(home)]
    if json:
        print_json([_about(offer, verdict) for offer, verdict in found])
        return
    if not found:
        console.print("Nothing is offered. The agent fetches offers while it runs: hemofed site join")
        return
    rows = [
        [o.run, _study_name(o), v.state, f"{v.terms.expires:%Y-%m-%d %H:%M}" if v.terms else "", v.reason]
        for o, v in found
    ]
    console.print(table(["run", "study", "state", "until (UTC)", ""], rows, words=5))


def _study_name(offer: Offer) -> str:
    """Also of one that this version cannot read."""
    try:
        return str(tomllib.loads(offer.study).get("name", ""))
    except tomllib.TOMLDecodeError:
        return ""


def _about(offer: Offer, verdict: Verdict) -> dict[str, Any]:
    until = verdict.terms.expires.isoformat() if verdict.terms else None
    return {"run": offer.run, "offer": offer.digest, "plan": offer.plan, "state": verdict.state, "expires": until,
            "reason": verdict.reason}  # fmt: skip


def approve_command(
    home: Path, run: str | None, officer: Path | None, second: Path | None, days: int, yes: bool, json: bool
) -> None:
    """Without a run: the list. Without the officer's key, or as JSON without `yes`: it is shown, and nothing is signed."""
    if run is None:
        offers_command(home, json)
        return
    own, offer = Home.open(home), offered(home, run)
    verdict = standing(own, offer)
    try:
        words = describe(offer, own)
    except BadStudy as error:  # of another version, most likely, which the verdict says
        raise Refused(verdict.reason) from error
    if not json:
        show_words(words)
        console.print(f"now: {verdict.state}" + (f": {verdict.reason}" if verdict.reason else ""), soft_wrap=True)
    if officer is None or (json and not yes):
        if json:
            print_json(_about(offer, verdict) | {"words": words.dump()})
        else:
            console.print("To approve it: hemofed site approve HOME RUN --officer KEY")
        return
    until = utc_now() + timedelta(days=days)
    if not yes and not typer.confirm(f"Approve {offer.run} until {until:%Y-%m-%d}?", default=False):
        console.print("not approved; nothing was signed")
        return
    entry = approve(own, offer, unlocked(officer), until, None if second is None else unlocked(second))
    if json:
        print_json(_about(offer, standing(own, offer)) | {"entry": entry.index})
    else:
        console.print(f"approved until {until:%Y-%m-%d %H:%M} UTC: entry {entry.index} of the ledger")


def show_words(words: Words) -> None:
    console.print(words.title, style="bold", soft_wrap=True)
    for warning in words.warnings:
        console.print(warning, style="red")
    for paragraph in words.paragraphs:
        console.print(paragraph)
    console.print(table(["", ""], words.facts, words=2))
    rows = [[one.what, one.when, one.protection] for one in words.leaves]
    console.print(table(["what leaves this site", "when", "protection"], rows, words=3))


def withdraw_command(home: Path, run: str, officer: Path | None, reason: str, json: bool) -> None:
    """The agent's own key is enough."""
    made = withdraw(Home.open(home), run, None if officer is None else unlocked(officer), reason)
    if json:
        print_json([{"entry": entry.index, **entry.body["terms"]} for entry in made])
    else:
        console.print(f"withdrawn: from the next message on this site does nothing more for {run}")


def policy_command(home: Path, officer: Path, second: str | None, consenting: Path | None) -> None:
    """`second`: the public key (64 hex digits), or the key file, of who must sign too; nobody if not given.
    `consenting`: the private key of who had to until now."""
    own = Home.open(home)
    ledger = own.ledger
    body = Policy(second=None if second is None else _public(second))
    if consenting is not None:
        given = consent(unlocked(consenting), body, ledger.id, ledger.head)
        body = body.model_copy(update={"consent": given})
    ledger.append(body, unlocked(officer))
    who = f"the officer and {show(body.second)} together approve" if body.second else "the officer alone approves"
    console.print(
        f"from now on {who}; approvals by one person no longer stand" if body.second else f"from now on {who}"
    )


def _public(given: str) -> str:
    if re.fullmatch(r"[0-9a-f]{64}", given):
        return given
    if not Path(given).is_file():
        raise BadKey(f"{given} is neither a public key (64 hex digits) nor a key's file; see `hemofed site key new`")
    return public_hex(unlocked(Path(given)))
