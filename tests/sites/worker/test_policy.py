"""The site's policy before every message: approval, task, disk space, and changes by other processes."""

import subprocess
import sys

import pytest

from privacy.ledger.keys import generate_key
from privacy.ledger.records import DatasetSnapshot
from sites.governance.settings import ResourceLimits, SiteSettings
from sites.worker.policy import TaskPolicy
from tests.support.hospital import SETTINGS, VALIDITY, Hospital, utc_now

REVOKE_CODE = """
import sys
from pathlib import Path
from sites.governance.approvals import revoke_approval
from sites.governance.home import SiteHome
revoke_approval(SiteHome.open(Path(sys.argv[1])), "run-1")
"""


@pytest.fixture
def hospital(tmp_path):
    return Hospital(tmp_path)


def test_tasks_need_a_valid_approval(hospital):
    offer, policy = hospital.make_offer(), TaskPolicy(hospital.home, SETTINGS)
    assert "run-1 is not approved" in policy.refusal_reason(offer, "train", utc_now())
    hospital.approve(offer)
    for task in ("train", "evaluate", "save_personal", "describe"):
        assert policy.refusal_reason(offer, task, utc_now()) is None
    assert "expired at" in policy.refusal_reason(offer, "train", utc_now() + VALIDITY)


def test_revocation_by_another_process_takes_effect_at_the_next_message(hospital):
    offer = hospital.make_offer()
    hospital.approve(offer)
    policy = TaskPolicy(hospital.home, SETTINGS)
    assert policy.refusal_reason(offer, "train") is None
    subprocess.run([sys.executable, "-c", REVOKE_CODE, hospital.path], check=True)
    assert "the approval was revoked" in policy.refusal_reason(offer, "train")


@pytest.mark.parametrize("task", ["", "__init__", "start", "model_dump", "advertise", "unmask"])
def test_unknown_tasks_are_refused(hospital, task):
    offer = hospital.make_offer()
    hospital.approve(offer)
    assert "has no task" in TaskPolicy(hospital.home, SETTINGS).refusal_reason(offer, task)


def test_secure_aggregation_allows_additional_tasks(hospital):
    offer = hospital.make_offer(**{"privacy.secure_aggregation.max_update_norm": 1.0})
    hospital.approve(offer)
    policy = TaskPolicy(hospital.home, SETTINGS)
    assert [policy.refusal_reason(offer, task) for task in ("advertise", "share", "unmask", "train")] == [None] * 4


def test_refusal_without_free_disk_space(hospital):
    offer = hospital.make_offer()
    hospital.approve(offer)
    refusal = TaskPolicy(hospital.home, SiteSettings(limits=ResourceLimits(min_free_disk_gb=1e9))).refusal_reason(
        offer, "train"
    )
    assert "must stay free; make room, or lower limits.min_free_disk_gb in site.toml" in refusal


def test_an_invalid_ledger_refuses_all_tasks(hospital):
    offer = hospital.make_offer()
    hospital.approve(offer)
    policy, file = TaskPolicy(hospital.home, SETTINGS), hospital.path / "ledger.jsonl"
    content = file.read_bytes()
    file.write_bytes(content[: content.index(b"\n") + 1])
    assert "was replaced while it was open" in policy.refusal_reason(offer, "train")
    file.write_bytes(content)
    assert policy.refusal_reason(offer, "train") is None
    with file.open("ab") as out:
        out.write(b'{"no": "entry"}\n')
    assert "it is not an entry" in policy.refusal_reason(offer, "train")


def test_ledger_refresh_reads_only_new_entries(hospital):
    """Entries that were read before are not parsed again."""
    reader, writer = hospital.home.ledger, hospital.home.ledger
    for units in range(20):
        writer.append(DatasetSnapshot(fingerprint="sha256:1", num_units=units, num_examples=units))
    reader.refresh()
    assert reader.head == writer.head
    ids_before = [id(entry) for entry in reader.entries()]
    reader.refresh()
    writer.append(DatasetSnapshot(fingerprint="sha256:1", num_units=99, num_examples=99))
    reader.refresh()
    assert [id(entry) for entry in reader.entries()][:-1] == ids_before
    assert reader.position == writer.position


def test_refusal_of_offers_from_another_coordinator(hospital):
    offer = hospital.make_offer()
    hospital.approve(offer)
    policy = TaskPolicy(hospital.home, SETTINGS)
    hospital.set_coordinator(generate_key())
    assert "and this site's coordinator is" in policy.refusal_reason(offer, "train")
    (hospital.path / "membership.json").write_text("{")
    assert "is damaged; restore it from a backup" in policy.refusal_reason(offer, "train")
