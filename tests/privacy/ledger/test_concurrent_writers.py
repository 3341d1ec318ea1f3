"""Several processes that append to one ledger file, and a file that is replaced while it is open."""

import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.core.errors import LedgerError
from privacy.ledger.keys import save_key
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import DatasetSnapshot
from privacy.ledger.verify import verify_ledger
from tests.support.ledger_factory import DATASET, LedgerParties, make_charge

WRITER = """
import sys
from pathlib import Path
from privacy.ledger.records import DatasetSnapshot
from privacy.ledger.keys import load_key
from privacy.ledger.ledger import Ledger
ledger = Ledger.open(Path(sys.argv[1]), load_key(Path(sys.argv[2])))
print("ready", flush=True)
sys.stdin.readline()
for n in range(int(sys.argv[3])):
    ledger.append(DatasetSnapshot(fingerprint=sys.argv[4], num_units=n, num_examples=n))
    print(n, flush=True)
"""


@pytest.fixture
def parties(tmp_path):
    return LedgerParties(tmp_path)


def start_writer(parties, num_entries, name):
    key_path = parties.folder / "agent.pem"
    if not key_path.exists():
        save_key(parties.agent, key_path)
    command = [sys.executable, "-c", WRITER, str(parties.path), str(key_path), str(num_entries), name]
    root = str(Path(__file__).parents[3])
    return subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def let_write(writer):
    writer.stdin.write("go\n")
    writer.stdin.flush()


def test_two_processes_append_in_turn(parties):
    parties.clock = lambda: datetime.now(UTC)
    ledger = parties.create_ledger()
    writers = [start_writer(parties, 40, name) for name in "ab"]
    assert [w.stdout.readline() for w in writers] == ["ready\n"] * 2
    for w in writers:
        let_write(w)
    for n in range(10):
        ledger.append(DatasetSnapshot(fingerprint="here", num_units=n, num_examples=n))
    assert [w.wait() for w in writers] == [0, 0]
    for w in writers:
        w.communicate()
    records = [e.record for e in Ledger.open(parties.path).entries("dataset")]
    assert verify_ledger(parties.path).is_valid
    assert len(records) == 90
    assert [r.num_units for r in records if r.fingerprint == "a"] == list(range(40))  # each in its own order
    assert ledger.append(DATASET).index == 91


def test_charge_computed_without_another_processes_charge_is_refused(parties):
    """Otherwise two agents could each spend the rest of the budget."""
    one = parties.create_ledger()
    two = parties.open_ledger()
    parties.charge_round(two, 0, 5.0)
    before = parties.path.read_bytes()
    with pytest.raises(LedgerError, match="compute the charge again"):
        one.append(make_charge(0, 5.0))
    assert parties.path.read_bytes() == before
    assert [c.total_epsilon for c in one.list_charges()] == [5.0]  # it has read the other charge now
    one.append(make_charge(1, 7.5))
    two.append(DATASET)
    one.append(DATASET)  # other records may follow unread entries
    assert verify_ledger(parties.path).is_valid


def test_killed_writer_loses_no_announced_entry(parties):
    parties.clock = lambda: datetime.now(UTC)
    parties.create_ledger()
    w = start_writer(parties, 10**6, "a")
    w.stdout.readline()
    let_write(w)
    last = [w.stdout.readline() for _ in range(50)][-1]
    w.send_signal(signal.SIGKILL)
    announced = [last, *w.communicate()[0].splitlines()]
    ledger = parties.open_ledger()
    assert ledger.last_index >= 1 + int(announced[-1])
    ledger.append(DATASET)
    assert verify_ledger(parties.path).is_valid


def test_backup_restored_under_a_running_agent_is_noticed(parties):
    ledger = parties.create_ledger()
    backup = parties.path.read_bytes()
    ledger.append(DATASET)
    parties.path.write_bytes(backup)
    with pytest.raises(LedgerError, match="was replaced while it was open"):
        ledger.append(DATASET)
