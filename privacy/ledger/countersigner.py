"""The coordinator's side of receipts: it remembers the head of every ledger, so that no site goes back behind it.

One head for each data set of each site. A request leads from the remembered head to the new one by digests; the new one
is written down, and only then signed. The first contact is believed, unless the officers' fingerprints are `expected`.
A coordinator that loses its record, or restores an old one, can be shown an old ledger: the record is as precious as
the key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ValidationError

from pipeline.core.errors import BadLedger
from pipeline.core.files import alone_in, write_atomically
from privacy.ledger.entry import START, Entry, chained, read_line
from privacy.ledger.keys import canonical, public_hex, sign, verified
from privacy.ledger.ledger import Clock, utc_now
from privacy.ledger.receipts import Request
from privacy.ledger.records import Open, Receipt, Strict
from privacy.ledger.signatures import Keys, after, missing, show


class Known(Strict):
    """What a coordinator remembers of a ledger."""

    keys: Keys
    receipt: Receipt


class Countersigner:
    """`expected`: the fingerprint of each site's officer; sites that are not named are then refused."""

    def __init__(
        self, folder: Path, key: Ed25519PrivateKey, expected: Mapping[str, str] | None = None, clock: Clock = utc_now
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._key, self._expected, self._clock = folder, key, expected, clock

    def countersign(self, asked: Request) -> Receipt:
        """The same receipt again for the same head, for an answer may be lost on its way."""
        with alone_in(self.folder, wait=True):
            known = self._known(asked.site, asked.dataset_id)
            same = known is not None and known.keys.ledger == asked.ledger
            if known and same and (asked.index, asked.head) == (known.receipt.index, known.receipt.head):
                _check_asker(asked, known.keys)
                return known.receipt
            keys = self._followed(asked, known if same else None, known)
            _check_asker(asked, keys)
            receipt = self._signed(asked)
            kept = Known(keys=keys, receipt=receipt).model_dump_json(indent=1)
            write_atomically(self._file(asked.site, asked.dataset_id), kept.encode())
            return receipt

    def last(self, site: str, dataset_id: str) -> Receipt | None:
        """The anchor against which an audit finds a tail that was cut off."""
        known = self._known(site, dataset_id)
        return known.receipt if known else None

    def _followed(self, asked: Request, start: Known | None, known: Known | None) -> Keys:
        """The keys in force at the new head, if it follows from the one remembered."""
        keys, head, at = (start.keys, start.receipt.head, start.receipt.index + 1) if start else (None, START, 0)
        if asked.since > at and known and not start:
            raise _stale(asked, known)
        if asked.since > at:
            raise BadLedger(f"{_who(asked)}: the coordinator needs the digests since entry {at}, not {asked.since}")
        shown = {entry.index: entry for entry in map(_read, asked.shown)}
        for index, digest in enumerate(asked.digests[at - asked.since :], start=at):
            before, head = head, chained(head, digest)
            if (entry := shown.get(index)) is not None:
                if (entry.digest, entry.before, entry.hash) != (digest, before, head):
                    raise BadLedger(f"{_who(asked)}: entry {index} as shown is not the one in the ledger")
                keys = self._changed(asked, keys, entry, known)
        if head != asked.head or asked.since + len(asked.digests) != asked.index + 1:
            raise _stale(asked, known) if known else BadLedger(f"{_who(asked)}: the digests do not lead to the head")
        if keys is None or keys.ledger != asked.ledger:
            raise BadLedger(f"{_who(asked)}: the first request must show the entry that opens the ledger")
        return keys

    def _changed(self, asked: Request, keys: Keys | None, entry: Entry, known: Known | None) -> Keys | None:
        body = entry.what
        wrong = list(missing(keys, entry, body))
        if isinstance(body, Open):
            if entry.index or (body.site, body.dataset_id) != (asked.site, asked.dataset_id):
                wrong.append(f"opens a ledger for {body.site}, {body.dataset_id}")
            self._welcome(asked, body, known)
        if wrong:
            raise BadLedger(f"{_who(asked)}: entry {entry.index} {'; '.join(wrong)}")
        return after(keys, entry, body)

    def _welcome(self, asked: Request, opening: Open, known: Known | None) -> None:
        """A ledger seen for the first time: as expected, and if there was another one, its officer's continuation."""
        vouched = self._expected is not None and self._expected.get(asked.site) == show(opening.officer)
        if known is None:
            if self._expected is not None and not vouched:
                raise BadLedger(
                    f"{_who(asked)}: its officer's key is {show(opening.officer)}, which is not the one expected; hear "
                    "the fingerprint from the officer, and add it to those expected"
                )
            return
        end, there = known.receipt, opening.continues
        if there is None or (there.ledger, there.index, there.head) != (known.keys.ledger, end.index, end.head):
            raise _stale(asked, known)
        if opening.officer != known.keys.officer and not vouched:
            raise BadLedger(
                f"{_who(asked)}: the new ledger's officer has key {show(opening.officer)}, the old one's "
                f"{show(known.keys.officer)}; if that is lost, hear the new fingerprint from him and expect it"
            )

    def _signed(self, asked: Request) -> Receipt:
        time = self._clock().isoformat(timespec="milliseconds")
        bare = Receipt(site=asked.site, dataset_id=asked.dataset_id, index=asked.index, head=asked.head, time=time,
                       key=public_hex(self._key), signature="0" * 128)  # fmt: skip
        return bare.model_copy(update={"signature": sign(self._key, "receipt", bare.statement())})

    def _file(self, site: str, dataset_id: str) -> Path:
        return self.folder / f"{hashlib.sha256(canonical([site, dataset_id])).hexdigest()[:32]}.json"

    def _known(self, site: str, dataset_id: str) -> Known | None:
        file = self._file(site, dataset_id)
        try:
            return Known.model_validate_json(file.read_bytes()) if file.exists() else None
        except ValidationError as error:
            raise BadLedger(
                f"{file}, which remembers {site}, {dataset_id}, is damaged; restore its newest copy"
            ) from error


def _read(line: str) -> Entry:
    return read_line(line.encode())


def _who(asked: Request) -> str:
    return f"{asked.site}, {asked.dataset_id}"


def _check_asker(asked: Request, keys: Keys) -> None:
    if keys.revoked:
        raise BadLedger(f"{_who(asked)}: the agent's key is revoked; the officer replaces it first")
    if not verified(keys.agent, "request", asked.statement(), asked.signature):
        raise BadLedger(
            f"{_who(asked)}: the request is not signed by the agent's key {show(keys.agent)}, but by {asked.key}"
        )


def _stale(asked: Request, known: Known) -> BadLedger:
    end = known.receipt
    return BadLedger(
        f"{_who(asked)}: this ledger, at its entry {asked.index}, is older than, or another than, the one receipted at entry "
        f"{end.index}. A restored backup does not refund what was spent: restore the newest copy. If that is lost, the "
        f"officer opens a new ledger that continues ledger {known.keys.ledger} from entry {end.index}, head {end.head}"
    )
