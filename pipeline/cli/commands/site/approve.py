"""`hemofed site offers | approve | revoke-approval | require-cosigner`: the officer's decisions on studies."""

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
        console.print("No study is offered. The agent fetches offers while it runs: hemofed site join")
        return
    rows = [
        [
            offer.run,
            _study_name(offer),
            status.state,
            f"{status.terms.expires:%Y-%m-%d %H:%M}" if status.terms else "",
            status.reason,
        ]
        for offer, status in offers_with_status
    ]
    console.print(build_table(["run", "study", "state", "until (UTC)", "reason"], rows, num_text_columns=5))


def _study_name(offer: StudyOffer) -> str:
    """The name, also of a study that this version cannot run; "" if the TOML is invalid."""
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
    """Without a run: lists the offers. Without the officer's key, or with `json` but not `assume_yes`: signs nothing."""
    if run is None:
        offers_command(home, json)
        return
    site_home, offer = SiteHome.open(home), find_offer(home, run)
    approval_status = check_approval(site_home, offer)
    try:
        summary = summarize_study(offer, site_home)
    except StudyError as error:  # most likely of another version; the reason says so
        raise IncompatibleStudyError(approval_status.reason) from error
    if not json:
        print_study_summary(summary)
        console.print(
            f"state: {approval_status.state}" + (f" ({approval_status.reason})" if approval_status.reason else ""),
            soft_wrap=True,
        )
    if officer_key_path is None or (json and not assume_yes):
        if json:
            print_json(_offer_to_dict(offer, approval_status) | {"words": summary.to_dict()})
        else:
            console.print("Approve it with: hemofed site approve HOME RUN --officer KEY")
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
    rows = [[disclosure.full_content, disclosure.when, disclosure.reason] for disclosure in summary.disclosures]
    console.print(build_table(["what leaves this site", "when", "protection"], rows, num_text_columns=3))


def revoke_approval_command(home: Path, run: str, officer_key_path: Path | None, reason: str, json: bool) -> None:
    """Without the officer's key, the site's own key signs the revocation."""
    entries = revoke_approval(
        SiteHome.open(home), run, None if officer_key_path is None else load_private_key(officer_key_path), reason
    )
    if json:
        print_json([{"entry": entry.index, **entry.body["terms"]} for entry in entries])
    else:
        console.print(f"revoked: from the next message on, this site does no more work for {run}")


def require_cosigner_command(
    home: Path, officer_key_path: Path, cosigner: str | None, current_cosigner_path: Path | None
) -> None:
    """`cosigner`: a public key (64 hex digits) or a key file; None: approvals need no cosigner any more.

    `current_cosigner_path`: private key of the cosigner in force, who has to consent to the change."""
    ledger = SiteHome.open(home).ledger
    policy = CosignerPolicy(cosigner_key=None if cosigner is None else _resolve_public_key(cosigner))
    if current_cosigner_path is not None:
        consent_signature = sign_consent(load_private_key(current_cosigner_path), policy, ledger.id, ledger.head)
        policy = policy.model_copy(update={"consent": consent_signature})
    ledger.append(policy, load_private_key(officer_key_path))
    console.print(
        f"approvals now need the officer and the cosigner {fingerprint_of(policy.cosigner_key)}; "
        "approvals signed by one person are no longer valid"
        if policy.cosigner_key
        else "approvals now need the officer only"
    )


def _resolve_public_key(key_or_path: str) -> str:
    """The key itself, or the public key of a private key file."""
    if re.fullmatch(r"[0-9a-f]{64}", key_or_path):
        return key_or_path
    if not Path(key_or_path).is_file():
        raise KeyFileError(
            f"{key_or_path} is neither a public key (64 hex digits) nor a key file; create one with `hemofed site key new`"
        )
    return public_hex(load_private_key(Path(key_or_path)))
