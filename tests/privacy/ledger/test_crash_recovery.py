"""Repair of the ledger file after a crash, a power cut, an editor, and on a full disk."""

import pytest

from pipeline.core.errors import LedgerError, NoSpaceError
from privacy.ledger.ledger import Ledger
from privacy.ledger.verify import verify_ledger
from tests.support.ledger_factory import DATASET, LedgerParties
from tests.support.machine import fill_disk, mount_small_disk


@pytest.fixture
def parties(tmp_path):
    return LedgerParties(tmp_path)


def test_torn_line_is_moved_aside(parties):
    ledger = parties.create_ledger()
    ledger.append(DATASET)
    complete = parties.path.read_bytes()
    line = ledger.append(DATASET).to_line()
    for n, length in enumerate((1, 2, 300, len(line) - 2), start=1):
        parties.path.write_bytes(complete + line[:length])
        assert not verify_ledger(parties.path).is_valid
        read_only = Ledger.open(parties.path)
        assert (read_only.last_index, read_only.torn_line_path) == (1, None)
        assert parties.path.read_bytes() == complete + line[:length]  # a reader repairs nothing
        repaired = parties.open_ledger()
        assert repaired.torn_line_path == parties.folder / f"ledger.torn-{n}"
        assert repaired.torn_line_path.read_bytes() == line[:length]
        assert parties.path.read_bytes() == complete
        assert repaired.append(DATASET).index == 2
        assert verify_ledger(parties.path).is_valid


def test_zeros_after_a_power_cut_are_moved_aside(parties):
    ledger = parties.create_ledger()
    with parties.path.open("ab") as file:
        file.write(bytes(200))
    assert ledger.append(DATASET).index == 1
    assert ledger.torn_line_path.read_bytes() == bytes(200)
    assert verify_ledger(parties.path).is_valid


def test_complete_line_without_line_break_is_kept(parties):
    """An editor that drops the last line break must not refund a charge."""
    ledger = parties.create_ledger()
    parties.charge_round(ledger, 0, 1.0)
    complete = parties.path.read_bytes()
    parties.path.write_bytes(complete[:-1])
    ledger = parties.open_ledger()
    assert (ledger.torn_line_path, ledger.last_index) == (None, 2)
    assert parties.path.read_bytes() == complete


def test_broken_line_in_the_middle_is_not_repaired(parties):
    ledger = parties.create_ledger()
    ledger.append(DATASET)
    lines = parties.path.read_bytes().splitlines(keepends=True)
    parties.path.write_bytes(lines[0] + lines[1][:100] + b"\n")
    with pytest.raises(LedgerError, match=r"line 2: it is not JSON.* restore the newest copy"):
        parties.open_ledger()


def test_full_disk_leaves_complete_lines(tmp_path):
    with mount_small_disk(tmp_path / "disk") as disk:
        parties = LedgerParties(disk)
        ledger = parties.create_ledger()
        fill_disk(disk)
        contents = []

        def append_until_full():
            while True:
                contents.append(parties.path.read_bytes())
                ledger.append(DATASET)

        with pytest.raises(NoSpaceError, match=r"no space left to write .*ledger\.jsonl"):
            append_until_full()
        assert parties.path.read_bytes() == contents[-1]
        (disk / "filling").unlink()
        count = ledger.last_index
        assert ledger.append(DATASET).index == count + 1
        assert ledger.torn_line_path is None
        assert verify_ledger(parties.path).is_valid
