"""`hemofed site offers`, `site approve`, `site revoke-approval` and `site require-cosigner`: what the officer sees and decides."""

from __future__ import annotations

import re
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import Any

import typer

from pipeline.cli.output import build_table, console, print_json
from pipeline.cli.passphrases import load_private_key
from pipeline.core.errors import IncompatibleStudyError, KeyFileError, StudyError
from pipeline.study.offer import StudyOffer
from privacy.ledger.keys import public_hex
from privacy.ledger.ledger import utc_now
from privacy.ledger.records import CosignerPolicy
from privacy.ledger.signatures import fingerprint_of, sign_consent
from sites.governance.approvals import ApprovalStatus, approve_offer, check_approval, revoke_approval
from sites.governance.home import SiteHome
from sites.governance.offers import find_offer, list_offers
from sites.governance.study_summary import StudySummary, summarize_study


def offers_command(home: Path, json: bool) -> None:
    site_home = SiteHome.open(home)
    offers_with_status = [(offer, check_approval(site_home, offer)) for offer in list_offers(home)]
    if json:
        print_json([_offer_to_dict(offer, approval_status) for offer, approval_status in offers_with_status])
        return
    if not offers_with_status:
        console.print("Nothing is offered. The agent fetches offers while it runs: hemofed site join")
        return
    rows = [
        [o.run, _study_name(o), v.state, f"{v.terms.expires:%Y-%m-%d %H:%M}" if v.terms else "", v.reason]
        for o, v in offers_with_status
    ]
    console.print(build_table(["run", "study", "state", "until (UTC)", ""], rows, num_text_columns=5))


def _study_name(offer: StudyOffer) -> str:
    """Also of one that this version cannot read."""
    try:
        return str(tomllib.loads(offer.study_toml).get("name", ""))
    except tomllib.TOMLDecodeError:
        return ""


def _offer_to_dict(offer: StudyOffer, approval_status: ApprovalStatus) -> dict[str, Any]:
    expires = approval_status.terms.expires.isoformat() if approval_status.terms else None
    return {
        "run": offer.run,
        "offer": offer.digest,
        "plan": offer.study_hash,
        "state": approval_status.state,
        "expires": expires,
        "reason": approval_status.reason,
    }


def approve_command(
    home: Path,
    run: str | None,
    officer_key_path: Path | None,
    cosigner_key_path: Path | None,
    days: int,
    assume_yes: bool,
    json: bool,
) -> None:
    """Without a run: the list. Without the officer's key, or as JSON without `yes`: it is shown, and nothing is signed."""
    if run is None:
        offers_command(home, json)
        return
    site_home, offer = SiteHome.open(home), find_offer(home, run)
    approval_status = check_approval(site_home, offer)
    try:
        summary = summarize_study(offer, site_home)
    except StudyError as error:  # of another version, most likely, which the verdict says
        raise IncompatibleStudyError(approval_status.reason) from error
    if not json:
        print_study_summary(summary)
        console.print(
            f"now: {approval_status.state}" + (f": {approval_status.reason}" if approval_status.reason else ""),
            soft_wrap=True,
        )
    if officer_key_path is None or (json and not assume_yes):
        if json:
            print_json(_offer_to_dict(offer, approval_status) | {"words": summary.to_dict()})
        else:
            console.print("To approve it: hemofed site approve HOME RUN --officer KEY")
        return
    expires = utc_now() + timedelta(days=days)
    if not assume_yes and not typer.confirm(f"Approve {offer.run} until {expires:%Y-%m-%d}?", default=False):
        console.print("not approved; nothing was signed")
        return
    entry = approve_offer(
        site_home,
        offer,
        load_private_key(officer_key_path),
        expires,
        None if cosigner_key_path is None else load_private_key(cosigner_key_path),
    )
    if json:
        print_json(_offer_to_dict(offer, check_approval(site_home, offer)) | {"entry": entry.index})
    else:
        console.print(f"approved until {expires:%Y-%m-%d %H:%M} UTC: entry {entry.index} of the ledger")


def print_study_summary(summary: StudySummary) -> None:
    console.print(summary.title, style="bold", soft_wrap=True)
    for warning in summary.warnings:
        console.print(warning, style="red")
    for paragraph in summary.paragraphs:
        console.print(paragraph)
    console.print(build_table(["", ""], summary.facts, num_text_columns=2))
    rows = [[disclosure.what, disclosure.when, disclosure.protection] for disclosure in summary.disclosures]
    console.print(build_table(["what leaves this site", "when", "protection"], rows, num_text_columns=3))


def revoke_approval_command(home: Path, run: str, officer_key_path: Path | None, reason: str, json: bool) -> None:
    """The agent's own key is enough."""
    entries = revoke_approval(
        SiteHome.open(home), run, None if officer_key_path is None else load_private_key(officer_key_path), reason
    )
    if json:
        print_json([{"entry": entry.index, **entry.body["terms"]} for entry in entries])
    else:
        console.print(f"withdrawn: from the next message on this site does nothing more for {run}")


def require_cosigner_command(
    home: Path, officer_key_path: Path, cosigner: str | None, current_cosigner_path: Path | None
) -> None:
    """`second`: the public key (64 hex digits), or the key file, of who must sign too; nobody if not given.
    `consenting`: the private key of who had to until now."""
    site_home = SiteHome.open(home)
    ledger = site_home.ledger
    policy = CosignerPolicy(cosigner_key=None if cosigner is None else _resolve_public_key(cosigner))
    if current_cosigner_path is not None:
        consent_signature = sign_consent(load_private_key(current_cosigner_path), policy, ledger.id, ledger.head)
        policy = policy.model_copy(update={"consent": consent_signature})
    ledger.append(policy, load_private_key(officer_key_path))
    approvers = (
        f"the officer and {fingerprint_of(policy.cosigner_key)} together approve"
        if policy.cosigner_key
        else "the officer alone approves"
    )
    console.print(
        f"from now on {approvers}; approvals by one person no longer stand"
        if policy.cosigner_key
        else f"from now on {approvers}"
    )


def _resolve_public_key(key_or_path: str) -> str:
    if re.fullmatch(r"[0-9a-f]{64}", key_or_path):
        return key_or_path
    if not Path(key_or_path).is_file():
        raise KeyFileError(
            f"{key_or_path} is neither a public key (64 hex digits) nor a key's file; see `hemofed site key new`"
        )
    return public_hex(load_private_key(Path(key_or_path)))
