"""`hemofed site init | budget | exclude-patient`, `site ledger show | verify | export` and `site key rotate | revoke`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pipeline.cli.output import build_table, console, print_json
from pipeline.cli.passphrases import load_private_key
from pipeline.core.errors import RunFolderError
from pipeline.reports.document.formatting import format_count
from pipeline.study.offer import SITE_NAME_PATTERN
from privacy.ledger import keys
from privacy.ledger.countersigner import CountersignedState
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import (
    AgentKeyRotated,
    ApprovalRevoked,
    ChargeRefused,
    CosignerPolicy,
    DatasetSnapshot,
    LedgerBudget,
    LedgerOpened,
    LedgerReceipt,
    LedgerRecord,
    PrivacyCharge,
    StudyApproved,
    StudyCommitment,
    UnitWithdrawn,
)
from privacy.ledger.verify import export_ledger, verify_ledger
from sites.governance.home import SiteHome
from sites.governance.settings import ResourceLimits, SiteSettings


def init_command(
    home: Path,
    site: str,
    dataset_id: str,
    privacy_unit: str,
    epsilon: float,
    delta: float,
    data: Path | None,
    simulate_site: str | None,
    officer_key_path: Path | None,
    json: bool,
) -> None:
    if not re.match(SITE_NAME_PATTERN, site):
        raise RunFolderError(
            f"{site!r} is not a valid site name; use up to 48 letters, digits, dashes and underscores, starting with a letter"
        )
    if data is not None and not data.exists():
        raise RunFolderError(f"{data} does not exist; name the folder of the site's images, or leave --data out")
    site_home = SiteHome.create(
        home,
        site,
        dataset_id,
        privacy_unit,
        LedgerBudget(epsilon=epsilon, delta=delta),
        None if officer_key_path is None else load_private_key(officer_key_path),
    )
    # a rehearsal needs little disk space
    limits = ResourceLimits(min_free_disk_gb=0.1) if simulate_site else ResourceLimits()
    SiteSettings(data=data and data.resolve(), simulated_site=simulate_site, limits=limits).save(home)
    home_info = {
        "home": str(home),
        "site": site,
        "dataset_id": dataset_id,
        "fingerprint": keys.fingerprint(keys.public_bytes(site_home.agent_key)),
    }
    if json:
        print_json(home_info)
        return
    console.print(f"{site}: {home}\nfingerprint of the agent's key: {home_info['fingerprint']}")
    if officer_key_path is None:
        console.print(
            f"The officer's key was created too: {home / 'officer.pem'}. Hand it to the officer, and delete it here."
        )


def show_ledger_command(home: Path, json: bool) -> None:
    ledger = Ledger.open(_ledger_file(home))
    ledger_summary = summarize_ledger(ledger)
    if json:
        print_json(ledger_summary | {"entries": [entry.to_dict() for entry in ledger.entries()]})
        return
    rows = [[str(e.index), e.time[:19].replace("T", " "), e.kind, describe_record(e.record)] for e in ledger.entries()]
    console.print(
        build_table(
            ["index", "time (UTC)", "entry", "content"],
            rows,
            f"{ledger_summary['site']}: {ledger_summary['dataset_id']}",
            num_text_columns=4,
        )
    )
    console.print(
        f"spent epsilon {ledger_summary['spent']:.4g} of {ledger_summary['budget']:g} at delta {ledger_summary['delta']:g} per {ledger_summary['unit']}; "
        f"left {ledger_summary['left']:.4g}"
    )


def summarize_ledger(ledger: Ledger) -> dict[str, Any]:
    """What was spent of the budget, and what is left."""
    from privacy.accounting.privacy_filter import compute_spent
    from privacy.ledger.spending import charge_history, filter_budget, planned_spending

    opening = ledger.state.opening
    spent_epsilon = compute_spent(charge_history(ledger), planned_spending(ledger), filter_budget(ledger)).epsilon
    return {
        "site": opening.site,
        "dataset_id": opening.dataset_id,
        "unit": opening.privacy_unit,
        "budget": ledger.budget.epsilon,
        "delta": ledger.budget.delta,
        "spent": spent_epsilon,
        "left": max(0.0, ledger.budget.epsilon - spent_epsilon),
        "forgotten": len(ledger.entries(UnitWithdrawn.kind)),
    }


def describe_record(record: LedgerRecord) -> str:
    """The content of an entry in one line."""
    match record:
        case LedgerOpened():
            return f"{record.site}, {record.dataset_id}: epsilon {record.budget.epsilon:g}, delta {record.budget.delta:g} per {record.privacy_unit}"
        case DatasetSnapshot():
            return f"{record.num_examples} examples of {record.num_units} units, fingerprint {record.fingerprint[:12]}"
        case StudyCommitment():
            return (
                f"{record.study}: at most {record.max_participations} rounds of {record.steps_per_round} steps, noise multiplier "
                f"{record.noise_multiplier:.4g}, sampling rate {record.sampling_rate:.4g}: epsilon {record.epsilon:.4g}"
            )
        case PrivacyCharge():
            attempt_text = f", attempt {record.attempt + 1}" if record.attempt else ""
            return f"{record.study}, round {record.round}{attempt_text}: {record.steps} steps; total spent {record.total_epsilon:.4g} ({record.accountant})"
        case LedgerReceipt():
            return f"the coordinator countersigned entry {record.index}"
        case ChargeRefused():
            return f"{record.study}, round {record.round}: {record.reason}"
        case UnitWithdrawn():
            return f"{record.unit_pseudonym[:12]}… withdrew" + (f": {record.reason}" if record.reason else "")
        case LedgerBudget():
            return f"new budget: epsilon {record.epsilon:g}, delta {record.delta:g}"
        case AgentKeyRotated():
            return f"new agent key {keys.fingerprint(bytes.fromhex(record.agent_key))} ({record.reason})"
        case StudyApproved() | ApprovalRevoked():
            expiry_text = f" until {str(record.terms['expires'])[:10]}" if "expires" in record.terms else ""
            return f"{record.terms.get('run', record.study_hash[:12])}{expiry_text}"
        case CosignerPolicy():
            return (
                f"cosigner: {keys.fingerprint(bytes.fromhex(record.cosigner_key)) if record.cosigner_key else 'none'}"
            )
        case _:
            return ", ".join(f"{k}: {v}" for k, v in record.model_dump(mode="json").items() if v)


def verify_ledger_command(ledger_path: Path, receipts_folder: Path | None, json: bool) -> None:
    """`receipts_folder`: the coordinator's receipts; without them, a truncated ledger is not detected."""
    last_receipt = None if receipts_folder is None else _find_receipt(_ledger_file(ledger_path), receipts_folder)
    verification = verify_ledger(_ledger_file(ledger_path), last_receipt)
    problems = [str(problem) for problem in verification.problems]
    if json:
        print_json({"ok": verification.is_valid, "problems": problems, "entries": len(verification.entries)})
    else:
        for problem in problems:
            console.print(problem, style="red")
        if verification.is_valid:
            anchor_hint = "" if last_receipt else "; whether the ledger was truncated can be checked with --anchor only"
            console.print(f"{len(verification.entries)} entries: all hashes and signatures are valid{anchor_hint}")
    if not verification.is_valid:
        raise RunFolderError(f"{ledger_path} is not valid: {format_count(len(problems), 'problem')}")


def _find_receipt(ledger_path: Path, receipts_folder: Path) -> LedgerReceipt:
    ledger_state = verify_ledger(ledger_path).state
    receipts = [CountersignedState.load(file).receipt for file in sorted(receipts_folder.glob("*.json"))]
    if ledger_state is not None:
        for receipt in receipts:
            if (receipt.site, receipt.dataset_id) == (ledger_state.opening.site, ledger_state.opening.dataset_id):
                return receipt
    raise RunFolderError(
        f"{receipts_folder} contains no receipt for {ledger_path}; give the coordinator's receipts, e.g. RUN/coordinator/receipts"
    )


def export_ledger_command(ledger_path: Path, out: Path) -> None:
    console.print(f"wrote {export_ledger(_ledger_file(ledger_path), out)}", soft_wrap=True)


def exclude_patient_command(home: Path, patient: str, reason: str, json: bool) -> None:
    site_home = SiteHome.open(home)
    is_new = site_home.withdraw_unit(patient, reason)
    charged_studies = sorted({charge.study for charge in site_home.ledger.list_charges()})
    if json:
        print_json({"news": is_new, "trained": charged_studies})
        return
    console.print("recorded: from the next run on, no data of this unit are read" if is_new else "already excluded")
    if charged_studies:
        ledger_summary = summarize_ledger(site_home.ledger)
        console.print(
            f"Models already trained here ({', '.join(charged_studies)}) are not changed. If this unit was in their training data, "
            f"what they reveal about it is bounded by epsilon {ledger_summary['spent']:.4g} at delta {ledger_summary['delta']:g}. The only "
            "remedy is to withdraw the models or to train them again."
        )
    else:
        console.print(
            "No study with differential privacy was trained here. Models trained without it may reveal this unit's data."
        )


def rotate_key_command(home: Path, officer_key_path: Path | None) -> None:
    """Signed by the old key, or by the officer's if the old key is lost."""
    key_path, new_key = home / "agent.pem", keys.generate_key()
    ledger = Ledger.open(home / "ledger.jsonl", None if officer_key_path else keys.load_key(key_path))
    ledger.rotate_agent_key(new_key, _load_officer_key(officer_key_path))
    key_path.rename(key_path.with_suffix(f".before-{ledger.last_index}.pem")) if key_path.exists() else None
    keys.save_key(new_key, key_path)
    console.print(f"new key: {keys.fingerprint(keys.public_bytes(new_key))}; read it to the coordinator by telephone")


def revoke_key_command(home: Path, officer_key_path: Path, last_trusted_index: int, reason: str) -> None:
    Ledger.open(home / "ledger.jsonl").revoke_agent_key(load_private_key(officer_key_path), last_trusted_index, reason)
    console.print("revoked; now create a new key with: hemofed site key rotate HOME --officer KEY")


def set_budget_command(home: Path, epsilon: float, delta: float | None, officer_key_path: Path) -> None:
    site_home = SiteHome.open(home)
    site_home.ledger.append(
        LedgerBudget(epsilon=epsilon, delta=delta or site_home.ledger.budget.delta), load_private_key(officer_key_path)
    )
    console.print(f"budget: epsilon {epsilon:g}")


def _load_officer_key(path: Path | None) -> Ed25519PrivateKey | None:
    return None if path is None else load_private_key(path)


def _ledger_file(path: Path) -> Path:
    """The ledger of a home folder; any other path is a ledger or an export itself."""
    return path / "ledger.jsonl" if path.is_dir() else path
