"""Verification: a thousand manipulations, forgeries by the holder of the agent's key, anchors, and exports."""

import json
import random
from dataclasses import replace
from datetime import datetime

import pytest

from pipeline.core.errors import LedgerError
from privacy.ledger.entry import LedgerEntry, LedgerPosition, chain_hash, parse_entry_line, sign_decision, sign_entry
from privacy.ledger.keys import canonical_json, fingerprint, generate_key, public_bytes, public_hex, sign
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import AgentKeyRevoked, DatasetSnapshot
from privacy.ledger.signatures import lost_key_rotation
from privacy.ledger.verify import export_ledger, verify_ledger
from tests.support.ledger_factory import DATASET_ID, SITE, LedgerParties, create_long_ledger, make_charge

NUM_MANIPULATIONS = 1000


@pytest.fixture(scope="module")
def long_ledger(tmp_path_factory):
    """(parties, last receipt)"""
    parties = LedgerParties(tmp_path_factory.mktemp("long"))
    return parties, create_long_ledger(parties)


def parse_entries(data):
    return [parse_entry_line(line) for line in data.split(b"\n")[:-1]]


def to_bytes(entries):
    return b"".join(entry.to_line() for entry in entries)


def parse_lines(data):
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def to_lines(raws):
    return b"".join(canonical_json(raw) + b"\n" for raw in raws)


# Manipulations without the site's keys: (data, rng) -> changed data


def leaves(value, path=()):
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inner is None:
        yield path
    else:
        for key, part in inner:
            yield from leaves(part, (*path, key))


def change_value(value, rng):
    if isinstance(value, bool) or value is None:
        return rng.choice([0, "", {}, [None]])
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, float(value), str(value), value * 10 + 7])
    if isinstance(value, float):
        return rng.choice([value * 0.5, value + 1e-12 * max(1, value), -value, round(value) + 2, repr(value)])
    if rng.random() < 0.1:
        return rng.choice([None, 5, [value], {"": value}])
    at = rng.randrange(len(value) + 1)
    letter = rng.choice("0123456789abcdef é-")
    changed = rng.choice(
        [value[:at] + letter + value[at:], value[:at] + letter + value[at + 1 :], value[:at], value.upper()]
    )
    return changed if changed != value else value + letter


def edit_value(data, rng):
    raws = parse_lines(data)
    raw = rng.choice(raws)
    path = rng.choice(list(leaves(raw)))
    for key in path[:-1]:
        raw = raw[key]
    raw[path[-1]] = change_value(raw[path[-1]], rng)
    return to_lines(raws)


def edit_and_rechain(data, rng):
    """Anyone can recompute the hashes; only the signatures are missing."""
    entries = parse_entries(data)
    at = rng.randrange(len(entries))
    path = rng.choice([p for p in leaves(entries[at].body) if p])
    body = json.loads(canonical_json(entries[at].body))
    part = body
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = change_value(part[path[-1]], rng)
    return to_bytes(rechain([*entries[:at], replace(entries[at], body=body), *entries[at + 1 :]], at))


def rechain(entries, start):
    chained = entries[:start]
    for index, entry in enumerate(entries[start:], start=start):
        previous_hash = chained[-1].hash if chained else "0" * 64
        entry = replace(entry, index=index, previous_hash=previous_hash)
        chained.append(replace(entry, hash=chain_hash(previous_hash, entry.digest)))
    return chained


def flip_bit(data, rng):
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def drop_lines(data, rng):
    raws = parse_lines(data)
    for _ in range(rng.randint(1, 4)):
        del raws[rng.randrange(len(raws))]
    return to_lines(raws)


def drop_and_rechain(data, rng):
    entries = parse_entries(data)
    at = rng.randrange(len(entries))
    return to_bytes(rechain([*entries[:at], *entries[at + 1 :]], at))


def swap_lines(data, rng):
    raws = parse_lines(data)
    one, two = rng.sample(range(len(raws)), 2)
    raws[one], raws[two] = raws[two], raws[one]
    return to_lines(raws)


def swap_and_renumber(data, rng):
    raws = json.loads(json.dumps(parse_lines(data)))
    one, two = rng.sample(range(len(raws)), 2)
    raws[one], raws[two] = raws[two] | {"index": one}, raws[one] | {"index": two}
    return to_lines(raws)


def duplicate_line(data, rng):
    raws = parse_lines(data)
    raws.insert(rng.randrange(len(raws) + 1), rng.choice(raws))
    return to_lines(raws)


def insert_foreign_entry(data, rng):
    """A well-formed entry by a foreign key; the entries after it are rechained or unchanged."""
    entries = parse_entries(data)
    at = rng.randrange(len(entries) + 1)
    key = generate_key()
    now = datetime.fromisoformat(entries[max(0, at - 1)].time)
    body = rng.choice([make_charge(7, 0.01), DatasetSnapshot(fingerprint="x", num_units=1, num_examples=1)])
    new = sign_entry(body, entries[:at], key, None, now)
    rest = [*entries[:at], new, *entries[at:]]
    return to_bytes(rechain(rest, at + 1) if rng.random() < 0.5 else rest)


def cut_bytes(data, rng):
    return data[: rng.randrange(len(data))]


def cut_lines(data, rng):
    return to_lines(parse_lines(data)[: -rng.randint(1, 30)])


def swap_signatures(data, rng):
    raws = parse_lines(data)
    one, two = rng.sample(raws, 2)
    one["signature"], two["signature"] = two["signature"], one["signature"]
    return to_lines(raws)


def swap_decisions(data, rng):
    raws = parse_lines(data)
    one, two = rng.sample([raw for raw in raws if raw["officer_decision"]], 2)
    one["officer_decision"], two["officer_decision"] = two["officer_decision"], one["officer_decision"]
    return to_lines(raws)


def remove_decision(data, rng):
    raws = parse_lines(data)
    rng.choice([raw for raw in raws if raw["officer_decision"]])["officer_decision"] = None
    return to_lines(raws)


def sign_with_foreign_key(data, rng):
    raws = parse_lines(data)
    raw, key = rng.choice(raws), generate_key()
    raw["signature"] = sign(key, "entry", raw["hash"])
    if rng.random() < 0.5:
        raw["key_fingerprint"] = fingerprint(public_bytes(key))
    return to_lines(raws)


def change_fields(data, rng):
    raws = parse_lines(data)
    raw = rng.choice(raws)
    if rng.random() < 0.5:
        raw["note"] = "harmless"
    else:
        del raw[rng.choice(list(raw))]
    return to_lines(raws)


def respell_json(data, rng):
    """The same JSON, written another way."""
    lines = data.split(b"\n")[:-1]
    at = rng.randrange(len(lines))
    ways = [
        lines[at] + b" ",
        b" " + lines[at],
        lines[at] + b"\r",
        json.dumps(json.loads(lines[at])).encode(),
        lines[at][:-1] + b',"kind":"charge"}',
        b"",
    ]
    lines[at] = rng.choice(ways)
    return b"\n".join(lines) + b"\n"


MANIPULATIONS = (
    edit_value,
    edit_and_rechain,
    flip_bit,
    drop_lines,
    drop_and_rechain,
    swap_lines,
    swap_and_renumber,
    duplicate_line,
    insert_foreign_entry,
    cut_bytes,
    cut_lines,
    swap_signatures,
    swap_decisions,
    remove_decision,
    sign_with_foreign_key,
    change_fields,
    respell_json,
)


SHORTENING = (drop_lines, drop_and_rechain, cut_bytes, cut_lines)  # a cut end is found only with an anchor


def test_verify_finds_a_thousand_manipulations(long_ledger, tmp_path):
    parties, anchor = long_ledger
    good, file = parties.path.read_bytes(), tmp_path / "ledger.jsonl"
    assert verify_ledger(parties.path, anchor).is_valid
    missed = []
    for trial in range(NUM_MANIPULATIONS):
        manipulate = MANIPULATIONS[trial % len(MANIPULATIONS)] if trial % 3 else edit_value
        bad = manipulate(good, random.Random(trial))
        assert bad != good
        file.write_bytes(bad)
        if verify_ledger(file, anchor if manipulate in SHORTENING else None).is_valid:
            missed.append((trial, manipulate.__name__))
    assert missed == []


@pytest.mark.parametrize("manipulate", [change for change in MANIPULATIONS if change not in SHORTENING])
def test_manipulated_ledger_is_neither_opened_nor_repaired(long_ledger, tmp_path, manipulate):
    parties, _ = long_ledger
    file = tmp_path / "ledger.jsonl"
    for trial in range(5):
        file.write_bytes(bad := manipulate(parties.path.read_bytes(), random.Random(trial)))
        with pytest.raises(LedgerError):
            Ledger.open(file, parties.agent)
        assert file.read_bytes() == bad


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"null\n",
        b'{"index":' + b"9" * 5000 + b"}\n",
        b"[" * 100_000,
        b'{"a":"\\ud800"}\n',
        b"{}\n" * 3,
        b'{"format":"hemofed-ledger-export/2"}\n',
    ],
)
def test_verify_rejects_junk_without_a_crash(tmp_path, junk):
    file = tmp_path / "ledger.jsonl"
    file.write_bytes(junk)
    verdict = verify_ledger(file)
    assert not verdict.is_valid
    assert verdict.entries == ()


@pytest.mark.parametrize("part", ["key_fingerprint", "seen_head", "signature"])
@pytest.mark.parametrize("value", [5, None, ["00"], {}])
def test_officer_decision_of_a_wrong_type_is_no_crash(long_ledger, tmp_path, part, value):
    raws = parse_lines(long_ledger[0].path.read_bytes())
    raws[2]["officer_decision"][part] = value
    (tmp_path / "l").write_bytes(to_lines(raws))
    verdict = verify_ledger(tmp_path / "l")
    assert len(verdict.entries) == 2
    assert "line 3: it is not an entry" in verdict.problems[0]


def test_problem_names_the_entry_once(long_ledger, tmp_path):
    parties, anchor = long_ledger
    raws = parse_lines(parties.path.read_bytes())
    raws[6]["body"]["total_epsilon"] = 0.01
    (tmp_path / "l").write_bytes(to_lines(raws))
    assert verify_ledger(tmp_path / "l", anchor).problems == (
        "entry 6: its hash does not match its contents; it was edited",
    )


# Forgeries with the agent's key


def forge_with_agent_key(folder, change):
    """(entries, last receipt): a valid chain with changed entries, signed with the agent's own key."""
    parties = LedgerParties(folder)
    ledger = parties.create_ledger()
    for round_number in range(3):
        parties.charge_round(ledger, round_number, 0.5 + round_number)
    anchor = parties.countersigner.last_receipt(SITE, DATASET_ID)
    ledger.append(make_charge(3, 3.5))
    entries = change(ledger.entries())
    forged: list[LedgerEntry] = []
    for entry in rechain(entries, 0):
        previous_hash = forged[-1].hash if forged else entry.previous_hash
        entry = replace(entry, previous_hash=previous_hash)
        entry = replace(entry, hash=chain_hash(previous_hash, entry.digest))
        forged.append(replace(entry, signature=sign(parties.agent, "entry", entry.hash)))
    return forged, anchor


def reduce_epsilon(index):
    return lambda entries: [
        replace(e, body=dict(e.body) | {"total_epsilon": 0.1}) if e.index == index else e for e in entries
    ]


def test_agent_key_cannot_rewrite_receipted_entries(tmp_path):
    forged, anchor = forge_with_agent_key(tmp_path, reduce_epsilon(3))
    assert any("entry 4: is a receipt for an entry 3" in problem for problem in verify_ledger(forged).problems)
    assert any("were rewritten" in problem for problem in verify_ledger(forged, anchor).problems)


def test_dropped_receipts_are_found_with_an_anchor(tmp_path):
    """One charge of four is left. Only the coordinator's receipt shows it."""
    forged, anchor = forge_with_agent_key(tmp_path, lambda entries: [entries[0], entries[1]])
    assert verify_ledger(forged).is_valid
    assert not verify_ledger(forged, anchor).is_valid


def test_agent_key_can_rewrite_entries_after_the_last_receipt(tmp_path):
    """As documented in verify.py. Such a charge permits no training, because it has no receipt."""
    forged, anchor = forge_with_agent_key(tmp_path, reduce_epsilon(7))
    verdict = verify_ledger(forged, anchor)
    assert verdict.is_valid
    assert verdict.unreceipted_indices == (7,)
    assert verdict.last_receipt == anchor


def test_wrong_index_or_previous_hash_is_found(tmp_path):
    parties = LedgerParties(tmp_path)
    (first,) = parties.create_ledger().entries()
    data = DatasetSnapshot(fingerprint="x", num_units=1, num_examples=1)
    for before, words in (
        ([first, first], "is in the place of entry 1"),
        ([replace(first, hash="ab" * 32)], "its previous hash is not"),
    ):
        entry = sign_entry(data, before, parties.agent, None, parties.clock())
        assert [words in problem for problem in verify_ledger([first, entry]).problems] == [True]


def test_ledger_must_start_with_opened(tmp_path):
    """The entries are valid otherwise, but no record says which keys count."""
    parties = LedgerParties(tmp_path)
    entries = []
    for n in range(3):
        entries.append(
            sign_entry(
                DatasetSnapshot(fingerprint="x", num_units=n, num_examples=1),
                entries,
                parties.agent,
                None,
                parties.clock(),
            )
        )
    assert verify_ledger(entries).problems == ("entry 0: a ledger starts with `opened`",)


def test_opening_decision_must_be_for_a_new_ledger(tmp_path):
    parties = LedgerParties(tmp_path)
    decision = sign_decision(parties.officer, parties.make_opening(), seen_head="ab" * 32)
    entry = sign_entry(parties.make_opening(), [], parties.agent, decision, parties.clock())
    assert verify_ledger([entry]).problems == ("entry 0: the officer's signature is not for a new ledger",)


def test_forged_rotation_changes_no_key(tmp_path):
    parties, thief = LedgerParties(tmp_path), generate_key()
    entries = parties.create_ledger().entries()
    for body in (lost_key_rotation(thief), DatasetSnapshot(fingerprint="x", num_units=1, num_examples=1)):
        entries.append(sign_entry(body, entries, thief, None, parties.clock()))
    problems = verify_ledger(entries).problems
    assert len(problems) == 2
    assert "entry 1: `agent_key_rotated` is for the officer to decide" in problems[0]
    assert "entry 2: is signed by key" in problems[1]


# Anchors, coordinators and exports


def test_cut_end_is_found_with_an_anchor(long_ledger):
    parties, anchor = long_ledger
    entries = parse_entries(parties.path.read_bytes())
    cut_off = entries[:-2]
    assert verify_ledger(cut_off).is_valid
    assert "its end was cut off" in verify_ledger(cut_off, anchor).problems[0]
    assert (
        "its end was cut off" in verify_ledger(cut_off, LedgerPosition(entries[-1].index, entries[-1].hash)).problems[0]
    )
    assert verify_ledger(entries, LedgerPosition(entries[9].index, entries[9].hash)).is_valid
    assert "does not hold that receipt" in verify_ledger(entries[:-1], anchor).problems[0]


def test_anchor_must_be_a_receipt_of_this_ledger(long_ledger):
    parties, anchor = long_ledger
    forged = anchor.model_copy(update={"time": "2031-01-01T00:00:00.000+00:00"})
    assert "on the receipt is not valid" in verify_ledger(parties.path, forged).problems[0]
    elsewhere = anchor.model_copy(update={"site": "elsewhere"})
    assert "is a receipt for elsewhere" in verify_ledger(parties.path, elsewhere).problems[0]


def test_receipts_of_unknown_coordinators_do_not_count(long_ledger):
    parties, anchor = long_ledger
    assert verify_ledger(parties.path, anchor, {public_hex(parties.coordinator)}).is_valid
    verdict = verify_ledger(parties.path, anchor, {public_hex(generate_key())})
    assert len(verdict.problems) == 8 + 1  # each receipt in the ledger, and the anchor
    assert all("not a known coordinator" in problem for problem in verdict.problems)


def test_export_verifies_like_its_ledger(long_ledger, tmp_path):
    parties, anchor = long_ledger
    out = export_ledger(parties.path, tmp_path / "export.json")
    assert verify_ledger(out, anchor) == verify_ledger(parties.path, anchor)
    document = json.loads(out.read_text("utf-8"))
    assert document["verdict"] == {"ok": True, "problems": []}
    assert document["summary"]["spent"] == {"epsilon": 2.5, "delta": 1e-05}
    assert document["summary"]["charges_by_study"] == {"anaemia": 6, "malaria": 2}
    assert list(document["keys"]["coordinators"].values()) == [public_hex(parties.coordinator)]


def test_edits_of_an_export_are_found(long_ledger, tmp_path):
    parties, anchor = long_ledger
    good = json.loads(export_ledger(parties.path, tmp_path / "export.json").read_text("utf-8"))
    file = tmp_path / "edited.json"
    for trial in range(150):
        rng = random.Random(trial)
        document = json.loads(json.dumps(good))
        path = rng.choice([p for p in leaves(document) if (p[0] == "entries") == bool(trial % 2)])
        part = document
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = change_value(part[path[-1]], rng)
        file.write_text(json.dumps(document), "utf-8")
        assert not verify_ledger(file, anchor).is_valid, path


def test_export_with_duplicate_keys_is_rejected(long_ledger, tmp_path):
    """JSON readers differ on which of two values counts."""
    parties, _ = long_ledger
    good = export_ledger(parties.path, tmp_path / "export.json").read_text("utf-8")
    for once, twice in (('"spent": {', '"spent": null, "spent": {'), ('"index": 3,', '"index": 9, "index": 3,')):
        assert once in good
        (tmp_path / "edited.json").write_text(good.replace(once, twice, 1), "utf-8")
        assert not verify_ledger(tmp_path / "edited.json").is_valid


def test_export_lists_the_problems_of_its_ledger(long_ledger, tmp_path):
    parties, _ = long_ledger
    bad = tmp_path / "ledger.jsonl"
    bad.write_bytes(swap_signatures(parties.path.read_bytes(), random.Random(1)))
    out = export_ledger(bad, tmp_path / "export.json")
    assert json.loads(out.read_text("utf-8"))["verdict"]["problems"] == list(verify_ledger(bad).problems) != []
    assert verify_ledger(out).problems == verify_ledger(bad).problems
    bad.write_bytes(b"junk\n")
    with pytest.raises(LedgerError, match="hand over the file itself"):
        export_ledger(bad, tmp_path / "other.json")


# Revoked keys


def test_entries_of_a_revoked_key_are_rejected(tmp_path):
    """The thief wrote entry 2; the officer trusts the key up to entry 1."""
    parties = LedgerParties(tmp_path)
    ledger = parties.create_ledger()
    ledger.append(DatasetSnapshot(fingerprint="a", num_units=1, num_examples=1))
    ledger.append(DatasetSnapshot(fingerprint="the thief's", num_units=1, num_examples=1))
    ledger.revoke_agent_key(parties.officer, last_trusted_index=1)
    verdict = verify_ledger(parties.path)
    assert len(verdict.problems) == 1
    assert "entry 2: is signed by key" in verdict.problems[0]
    assert "revoked (entry 3)" in verdict.problems[0]
    with pytest.raises(LedgerError, match="opens a new one that continues it"):
        Ledger.open(parties.path)
    assert isinstance(verdict.entries[3].record, AgentKeyRevoked)


def test_export_of_format_version_1_is_refused(long_ledger, tmp_path):
    parties, anchor = long_ledger
    out = export_ledger(parties.path, tmp_path / "export.json")
    out.write_text(out.read_text("utf-8").replace("hemofed-ledger-export/2", "hemofed-ledger-export/1"), "utf-8")
    assert verify_ledger(out, anchor).problems == (
        "the export has format hemofed-ledger-export/1 and this hemofed reads hemofed-ledger-export/2; export the ledger again",
    )
