"""What the agent asks before every message: approval, task, room on the disk; and that others' words are heard at once."""

import subprocess
import sys

import pytest

from privacy.ledger.keys import generate_key
from privacy.ledger.records import DatasetSnapshot
from sites.governance.settings import ResourceLimits, SiteSettings
from sites.worker.policy import TaskPolicy
from tests.support.hospital import ROOMY, SOON, Hospital, now

WITHDRAW = """
import sys
from pathlib import Path
from sites.governance.approvals import withdraw
from sites.governance.home import Home
withdraw(Home.open(Path(sys.argv[1])), "run-1")
"""


@pytest.fixture
def hospital(tmp_path):
    return Hospital(tmp_path)


def test_no_approval_no_work(hospital):
    offer, policy = hospital.offer(), TaskPolicy(hospital.home, ROOMY)
    assert "run-1 is not approved" in policy.refusal_reason(offer, "train", now())
    hospital.approve(offer)
    for task in ("train", "evaluate", "save_personal", "about"):
        assert policy.refusal_reason(offer, task, now()) is None
    assert "ended at" in policy.refusal_reason(offer, "train", now() + SOON)


def test_another_process_withdraws_and_the_next_message_is_refused(hospital):
    offer = hospital.offer()
    hospital.approve(offer)
    policy = TaskPolicy(hospital.home, ROOMY)
    assert policy.refusal_reason(offer, "train") is None
    subprocess.run([sys.executable, "-c", WITHDRAW, hospital.path], check=True)
    assert "the approval was withdrawn" in policy.refusal_reason(offer, "train")


@pytest.mark.parametrize("task", ["", "__init__", "start", "model_dump", "advertise", "unmask"])
def test_other_tasks_are_refused(hospital, task):
    offer = hospital.offer()
    hospital.approve(offer)
    assert "has no task" in TaskPolicy(hospital.home, ROOMY).refusal_reason(offer, task)


def test_a_secure_sum_has_tasks_of_its_own(hospital):
    offer = hospital.offer(**{"privacy.secure_aggregation.max_update_norm": 1.0})
    hospital.approve(offer)
    policy = TaskPolicy(hospital.home, ROOMY)
    assert [policy.refusal_reason(offer, task) for task in ("advertise", "share", "unmask", "train")] == [None] * 4


def test_a_full_disk(hospital):
    offer = hospital.offer()
    hospital.approve(offer)
    told = TaskPolicy(hospital.home, SiteSettings(limits=ResourceLimits(min_free_disk_gb=1e9))).refusal_reason(
        offer, "train"
    )
    assert "must stay free; make room, or lower limits.disk_gb in site.toml" in told


def test_a_ledger_that_cannot_be_believed_permits_nothing(hospital):
    offer = hospital.offer()
    hospital.approve(offer)
    policy, file = TaskPolicy(hospital.home, ROOMY), hospital.path / "ledger.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[: whole.index(b"\n") + 1])
    assert "was replaced while it was open" in policy.refusal_reason(offer, "train")
    file.write_bytes(whole)
    assert policy.refusal_reason(offer, "train") is None
    with file.open("ab") as out:
        out.write(b'{"no": "entry"}\n')
    assert "it is no entry" in policy.refusal_reason(offer, "train")


def test_refreshing_reads_the_end_alone(hospital):
    """However long the ledger is: what was read before is not read again."""
    watching, writing = hospital.home.ledger, hospital.home.ledger
    for units in range(20):
        writing.append(DatasetSnapshot(fingerprint="sha256:1", num_units=units, num_examples=units))
    watching.refresh()
    assert watching.head == writing.head
    before = [id(entry) for entry in watching.entries()]
    watching.refresh()
    writing.append(DatasetSnapshot(fingerprint="sha256:1", num_units=99, num_examples=99))
    watching.refresh()
    assert [id(entry) for entry in watching.entries()][:-1] == before
    assert watching.mark == writing.mark


def test_the_coordinator_is_the_one_that_was_joined(hospital):
    offer = hospital.offer()
    hospital.approve(offer)
    policy = TaskPolicy(hospital.home, ROOMY)
    hospital.join(generate_key())
    assert "and this site's coordinator is" in policy.refusal_reason(offer, "train")
    (hospital.path / "membership.json").write_text("{")
    assert "is damaged; restore it from a backup" in policy.refusal_reason(offer, "train")
