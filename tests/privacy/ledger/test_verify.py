"""Audits: a thousand manipulations are found, what the key's holder can do and cannot, exports, and what needs help."""

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
from tests.support.ledger_factory import World, a_year, charge

THOUSAND = 1000


@pytest.fixture(scope="module")
def year(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("year"))
    return world, a_year(world)


def entries_of(data):
    return [parse_entry_line(line) for line in data.split(b"\n")[:-1]]


def bytes_of(entries):
    return b"".join(entry.line() for entry in entries)


def raws_of(data):
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def lines_of(raws):
    return b"".join(canonical_json(raw) + b"\n" for raw in raws)


# Manipulations by somebody without the site's keys: (data, dice) -> other data


def leaves(value, path=()):
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inner is None:
        yield path
    else:
        for key, part in inner:
            yield from leaves(part, (*path, key))


def other(value, dice):
    if isinstance(value, bool) or value is None:
        return dice.choice([0, "", {}, [None]])
    if isinstance(value, int):
        return dice.choice([value + 1, value - 1, float(value), str(value), value * 10 + 7])
    if isinstance(value, float):
        return dice.choice([value * 0.5, value + 1e-12 * max(1, value), -value, round(value) + 2, repr(value)])
    if dice.random() < 0.1:
        return dice.choice([None, 5, [value], {"": value}])
    at = dice.randrange(len(value) + 1)
    letter = dice.choice("0123456789abcdef é-")
    changed = dice.choice(
        [value[:at] + letter + value[at:], value[:at] + letter + value[at + 1 :], value[:at], value.upper()]
    )
    return changed if changed != value else value + letter


def edited(data, dice):
    raws = raws_of(data)
    raw = dice.choice(raws)
    path = dice.choice(list(leaves(raw)))
    for key in path[:-1]:
        raw = raw[key]
    raw[path[-1]] = other(raw[path[-1]], dice)
    return lines_of(raws)


def edited_and_chained(data, dice):
    """Hashes are for everyone: only the signatures are in the way."""
    entries = entries_of(data)
    at = dice.randrange(len(entries))
    path = dice.choice([p for p in leaves(entries[at].body) if p])
    body = json.loads(canonical_json(entries[at].body))
    part = body
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = other(part[path[-1]], dice)
    return bytes_of(rechained([*entries[:at], replace(entries[at], body=body), *entries[at + 1 :]], at))


def rechained(entries, start):
    done = entries[:start]
    for index, entry in enumerate(entries[start:], start=start):
        before = done[-1].hash if done else "0" * 64
        moved = replace(entry, index=index, before=before)
        done.append(replace(moved, hash=chain_hash(before, moved.digest)))
    return done


def flipped(data, dice):
    at = dice.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :]


def dropped(data, dice):
    raws = raws_of(data)
    for _ in range(dice.randint(1, 4)):
        del raws[dice.randrange(len(raws))]
    return lines_of(raws)


def dropped_and_chained(data, dice):
    entries = entries_of(data)
    at = dice.randrange(len(entries))
    return bytes_of(rechained([*entries[:at], *entries[at + 1 :]], at))


def reordered(data, dice):
    raws = raws_of(data)
    one, two = dice.sample(range(len(raws)), 2)
    raws[one], raws[two] = raws[two], raws[one]
    return lines_of(raws)


def renumbered(data, dice):
    raws = json.loads(json.dumps(raws_of(data)))
    one, two = dice.sample(range(len(raws)), 2)
    raws[one], raws[two] = raws[two] | {"index": one}, raws[one] | {"index": two}
    return lines_of(raws)


def doubled(data, dice):
    raws = raws_of(data)
    raws.insert(dice.randrange(len(raws) + 1), dice.choice(raws))
    return lines_of(raws)


def inserted(data, dice):
    """A well-made entry by a foreign key, with what comes after it chained to it or left alone."""
    entries = entries_of(data)
    at = dice.randrange(len(entries) + 1)
    key = generate_key()
    now = datetime.fromisoformat(entries[max(0, at - 1)].time)
    body = dice.choice([charge(7, 0.01), DatasetSnapshot(fingerprint="x", num_units=1, num_examples=1)])
    new = sign_entry(body, entries[:at], key, None, now)
    rest = [*entries[:at], new, *entries[at:]]
    return bytes_of(rechained(rest, at + 1) if dice.random() < 0.5 else rest)


def cut(data, dice):
    return data[: dice.randrange(len(data))]


def cut_after_an_entry(data, dice):
    return lines_of(raws_of(data)[: -dice.randint(1, 30)])


def swapped_signatures(data, dice):
    raws = raws_of(data)
    one, two = dice.sample(raws, 2)
    one["signature"], two["signature"] = two["signature"], one["signature"]
    return lines_of(raws)


def swapped_decisions(data, dice):
    raws = raws_of(data)
    one, two = dice.sample([raw for raw in raws if raw["officer"]], 2)
    one["officer"], two["officer"] = two["officer"], one["officer"]
    return lines_of(raws)


def undecided(data, dice):
    raws = raws_of(data)
    dice.choice([raw for raw in raws if raw["officer"]])["officer"] = None
    return lines_of(raws)


def signed_by_another(data, dice):
    raws = raws_of(data)
    raw, key = dice.choice(raws), generate_key()
    raw["signature"] = sign(key, "entry", raw["hash"])
    if dice.random() < 0.5:
        raw["key"] = fingerprint(public_bytes(key))
    return lines_of(raws)


def other_fields(data, dice):
    raws = raws_of(data)
    raw = dice.choice(raws)
    if dice.random() < 0.5:
        raw["note"] = "harmless"
    else:
        del raw[dice.choice(list(raw))]
    return lines_of(raws)


def respelt(data, dice):
    """The same JSON, written another way."""
    lines = data.split(b"\n")[:-1]
    at = dice.randrange(len(lines))
    ways = [
        lines[at] + b" ",
        b" " + lines[at],
        lines[at] + b"\r",
        json.dumps(json.loads(lines[at])).encode(),
        lines[at][:-1] + b',"kind":"charge"}',
        b"",
    ]
    lines[at] = dice.choice(ways)
    return b"\n".join(lines) + b"\n"


WAYS = (
    edited,
    edited_and_chained,
    flipped,
    dropped,
    dropped_and_chained,
    reordered,
    renumbered,
    doubled,
    inserted,
    cut,
    cut_after_an_entry,
    swapped_signatures,
    swapped_decisions,
    undecided,
    signed_by_another,
    other_fields,
    respelt,
)


SHORTER = (dropped, dropped_and_chained, cut, cut_after_an_entry)  # if at the end, found by an anchor alone


def test_a_thousand_manipulations_are_found(year, tmp_path):
    world, anchor = year
    good, file = world.path.read_bytes(), tmp_path / "ledger.jsonl"
    assert verify_ledger(world.path, anchor).is_valid
    missed = []
    for trial in range(THOUSAND):
        way = WAYS[trial % len(WAYS)] if trial % 3 else edited
        bad = way(good, random.Random(trial))
        assert bad != good
        file.write_bytes(bad)
        if verify_ledger(file, anchor if way in SHORTER else None).is_valid:
            missed.append((trial, way.__name__))
    assert missed == []


@pytest.mark.parametrize("way", [way for way in WAYS if way not in SHORTER])
def test_a_manipulated_ledger_is_neither_opened_nor_mended(year, tmp_path, way):
    world, _ = year
    file = tmp_path / "ledger.jsonl"
    for trial in range(5):
        file.write_bytes(bad := way(world.path.read_bytes(), random.Random(trial)))
        with pytest.raises(LedgerError):
            Ledger.open(file, world.agent)
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
        b'{"format":"hemofed-ledger-export/1"}\n',
    ],
)
def test_junk_is_no_ledger_and_no_crash(tmp_path, junk):
    file = tmp_path / "ledger.jsonl"
    file.write_bytes(junk)
    verdict = verify_ledger(file)
    assert not verdict.is_valid
    assert verdict.entries == ()


@pytest.mark.parametrize("part", ["key", "seen", "signature"])
@pytest.mark.parametrize("value", [5, None, ["00"], {}])
def test_an_officers_part_of_another_type_is_no_crash(year, tmp_path, part, value):
    raws = raws_of(year[0].path.read_bytes())
    raws[2]["officer"][part] = value
    (tmp_path / "l").write_bytes(lines_of(raws))
    verdict = verify_ledger(tmp_path / "l")
    assert len(verdict.entries) == 2
    assert "line 3: it is no entry" in verdict.problems[0]


def test_a_problem_names_the_entry_once(year, tmp_path):
    world, anchor = year
    raws = raws_of(world.path.read_bytes())
    raws[6]["body"]["epsilon"] = 0.01
    (tmp_path / "l").write_bytes(lines_of(raws))
    assert verify_ledger(tmp_path / "l", anchor).problems == (
        "entry 6: its hash does not fit what it says; it was edited",
    )


# The holder of the agent's key


def held(folder, change):
    """Everything from the first changed entry on written anew, in good order, with the agent's own key."""
    world = World(folder)
    ledger = world.create()
    for turn in range(3):
        world.train(ledger, turn, 0.5 + turn)
    anchor = world.desk.last_receipt("st-anne", "smears-2019-2024")
    ledger.append(charge(3, 3.5))
    entries = change(ledger.entries())
    forged: list[LedgerEntry] = []
    for entry in rechained(entries, 0):
        before = forged[-1].hash if forged else entry.previous_hash
        fresh = replace(entry, before=before)
        fresh = replace(fresh, hash=chain_hash(before, fresh.digest))
        forged.append(replace(fresh, signature=sign(world.agent, "entry", fresh.hash)))
    return forged, anchor


def cheaper(index):
    return lambda entries: [
        replace(e, body=dict(e.body) | {"epsilon": 0.1}) if e.index == index else e for e in entries
    ]


def test_the_holder_cannot_rewrite_what_was_receipted(tmp_path):
    forged, anchor = held(tmp_path, cheaper(3))
    assert any("entry 4: is a receipt for an entry 3" in problem for problem in verify_ledger(forged).problems)
    assert any("written anew" in problem for problem in verify_ledger(forged, anchor).problems)


def test_dropping_the_receipts_too_takes_an_anchor_to_find(tmp_path):
    """One charge of four is left. Nothing inside shows it; the coordinator's receipt does."""
    forged, anchor = held(tmp_path, lambda entries: [entries[0], entries[1]])
    assert verify_ledger(forged).is_valid
    assert not verify_ledger(forged, anchor).is_valid


def test_what_came_after_the_last_receipt_the_holder_can_rewrite(tmp_path):
    """As `verify` says. Nothing may be trained on it: it has no receipt."""
    forged, anchor = held(tmp_path, cheaper(7))
    verdict = verify_ledger(forged, anchor)
    assert verdict.is_valid
    assert verdict.unreceipted_indices == (7,)
    assert verdict.last_receipt == anchor


def test_the_holder_cannot_misnumber_or_unchain(tmp_path):
    world = World(tmp_path)
    (first,) = world.create().entries()
    data = DatasetSnapshot(fingerprint="x", num_units=1, num_examples=1)
    for before, words in (
        ([first, first], "stands where entry 1 should"),
        ([replace(first, hash="ab" * 32)], "does not follow"),
    ):
        entry = sign_entry(data, before, world.agent, None, world.clock())
        assert [words in problem for problem in verify_ledger([first, entry]).problems] == [True]


def test_what_does_not_start_with_open_is_no_ledger(tmp_path):
    """Each entry would be in good order otherwise; but nobody says whose keys count."""
    world = World(tmp_path)
    entries = []
    for n in range(3):
        entries.append(
            sign_entry(
                DatasetSnapshot(fingerprint="x", num_units=n, num_examples=1), entries, world.agent, None, world.clock()
            )
        )
    assert verify_ledger(entries).problems == ("entry 0: a ledger starts with `open`",)


def test_an_opening_is_decided_for_a_new_ledger(tmp_path):
    world = World(tmp_path)
    decision = sign_decision(world.officer, world.opening(), seen_head="ab" * 32)
    entry = sign_entry(world.opening(), [], world.agent, decision, world.clock())
    assert verify_ledger([entry]).problems == ("entry 0: the officer's signature is not for a new ledger",)


def test_a_forged_rotation_brings_no_key_into_force(tmp_path):
    world, thief = World(tmp_path), generate_key()
    entries = world.create().entries()
    for body in (lost_key_rotation(thief), DatasetSnapshot(fingerprint="x", num_units=1, num_examples=1)):
        entries.append(sign_entry(body, entries, thief, None, world.clock()))
    problems = verify_ledger(entries).problems
    assert len(problems) == 2
    assert "entry 1: `rotate` is for the officer to decide" in problems[0]
    assert "entry 2: is signed by key" in problems[1]


# Anchors, coordinators and exports


def test_a_cut_tail_needs_an_anchor(year):
    world, anchor = year
    entries = entries_of(world.path.read_bytes())
    cut_off = entries[:-2]
    assert verify_ledger(cut_off).is_valid
    assert "its end was cut off" in verify_ledger(cut_off, anchor).problems[0]
    assert (
        "its end was cut off" in verify_ledger(cut_off, LedgerPosition(entries[-1].index, entries[-1].hash)).problems[0]
    )
    assert verify_ledger(entries, LedgerPosition(entries[9].index, entries[9].hash)).is_valid
    assert "does not hold that receipt" in verify_ledger(entries[:-1], anchor).problems[0]


def test_an_anchor_must_be_a_receipt_of_this_ledger(year):
    world, anchor = year
    forged = anchor.model_copy(update={"time": "2031-01-01T00:00:00.000+00:00"})
    assert "does not fit its receipt" in verify_ledger(world.path, forged).problems[0]
    elsewhere = anchor.model_copy(update={"site": "elsewhere"})
    assert "is a receipt for elsewhere" in verify_ledger(world.path, elsewhere).problems[0]


def test_receipts_of_strangers_do_not_count(year):
    world, anchor = year
    assert verify_ledger(world.path, anchor, {public_hex(world.coordinator)}).is_valid
    verdict = verify_ledger(world.path, anchor, {public_hex(generate_key())})
    assert len(verdict.problems) == 8 + 1  # each receipt in the ledger, and the anchor
    assert all("no coordinator known here" in problem for problem in verdict.problems)


def test_an_export_is_checked_like_its_ledger(year, tmp_path):
    world, anchor = year
    out = export_ledger(world.path, tmp_path / "export.json")
    assert verify_ledger(out, anchor) == verify_ledger(world.path, anchor)
    document = json.loads(out.read_text("utf-8"))
    assert document["verdict"] == {"ok": True, "problems": []}
    assert document["summary"]["spent"] == {"epsilon": 2.5, "delta": 1e-05}
    assert document["summary"]["charges_by_study"] == {"anaemia": 6, "malaria": 2}
    assert list(document["keys"]["coordinators"].values()) == [public_hex(world.coordinator)]


def test_edits_of_an_export_are_found_wherever_they_are(year, tmp_path):
    world, anchor = year
    good = json.loads(export_ledger(world.path, tmp_path / "export.json").read_text("utf-8"))
    file = tmp_path / "edited.json"
    for trial in range(150):
        dice = random.Random(trial)
        document = json.loads(json.dumps(good))
        path = dice.choice([p for p in leaves(document) if (p[0] == "entries") == bool(trial % 2)])
        part = document
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = other(part[path[-1]], dice)
        file.write_text(json.dumps(document), "utf-8")
        assert not verify_ledger(file, anchor).is_valid, path


def test_an_export_says_nothing_twice(year, tmp_path):
    """Readers differ on which of two values counts."""
    world, _ = year
    good = export_ledger(world.path, tmp_path / "export.json").read_text("utf-8")
    for once, twice in (('"spent": {', '"spent": null, "spent": {'), ('"index": 3,', '"index": 9, "index": 3,')):
        assert once in good
        (tmp_path / "edited.json").write_text(good.replace(once, twice, 1), "utf-8")
        assert not verify_ledger(tmp_path / "edited.json").is_valid


def test_an_export_tells_what_is_wrong_with_its_ledger(year, tmp_path):
    world, _ = year
    bad = tmp_path / "ledger.jsonl"
    bad.write_bytes(swapped_signatures(world.path.read_bytes(), random.Random(1)))
    out = export_ledger(bad, tmp_path / "export.json")
    assert json.loads(out.read_text("utf-8"))["verdict"]["problems"] == list(verify_ledger(bad).problems) != []
    assert verify_ledger(out).problems == verify_ledger(bad).problems
    bad.write_bytes(b"junk\n")
    with pytest.raises(LedgerError, match="hand over the file itself"):
        export_ledger(bad, tmp_path / "other.json")


# Revoked keys


def test_what_a_revoked_key_signed_is_not_believed(tmp_path):
    """The thief wrote entry 2; the officer says that the key is good up to entry 1 only."""
    world = World(tmp_path)
    ledger = world.create()
    ledger.append(DatasetSnapshot(fingerprint="a", num_units=1, num_examples=1))
    ledger.append(DatasetSnapshot(fingerprint="the thief's", num_units=1, num_examples=1))
    ledger.revoke_agent_key(world.officer, last_trusted_index=1)
    verdict = verify_ledger(world.path)
    assert len(verdict.problems) == 1
    assert "entry 2: is signed by key" in verdict.problems[0]
    assert "revoked (entry 3)" in verdict.problems[0]
    with pytest.raises(LedgerError, match="opens a new one that continues it"):
        Ledger.open(world.path)
    assert isinstance(verdict.entries[3].record, AgentKeyRevoked)
