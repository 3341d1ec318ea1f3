"""Answers a site's request for a ledger receipt. Request and answer are JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from pipeline.core.errors import HemofedError, LedgerError
from pipeline.service.storage.expected_officers import expected_officer
from privacy.ledger import keys
from privacy.ledger.countersigner import LedgerCountersigner
from privacy.ledger.receipts import ReceiptRequest
from privacy.ledger.records import LedgerReceipt


def countersign_request(
    home: Path, site: str, request_json: str, on_receipt: Callable[[LedgerReceipt], None] | None = None
) -> str:
    """Returns {"receipt": ...} or {"refused": reason}.

    `site`: the authenticated sender; a request in another site's name is refused. `on_receipt`: records the receipt.
    """
    try:
        request = ReceiptRequest.model_validate_json(request_json)
        if request.site != site:
            raise LedgerError(f"{site} asked for a receipt in the name of {request.site}; each site asks for its own")
        signer = LedgerCountersigner(
            home / "receipts", keys.load_key(home / "key.pem"), expected_officer(home, request.site)
        )
        receipt = signer.countersign(request)
        if on_receipt is not None:
            on_receipt(receipt)
        return json.dumps({"receipt": receipt.model_dump(mode="json")})
    except ValidationError:
        return json.dumps({"refused": "this is not a receipt request; use the same version of hemofed at the site"})
    except HemofedError as error:
        return json.dumps({"refused": str(error)})
