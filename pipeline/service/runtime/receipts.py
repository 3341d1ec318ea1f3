"""A site's request for a receipt, and the coordinator's answer, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from pipeline.core.errors import HemofedError, LedgerError
from privacy.ledger import keys
from privacy.ledger.countersigner import LedgerCountersigner
from privacy.ledger.receipts import ReceiptRequest
from privacy.ledger.records import LedgerReceipt


def countersign_request(
    home: Path, site: str, request_json: str, on_receipt: Callable[[LedgerReceipt], None] | None = None
) -> str:
    """`site`: whose connection it came by; a request in another's name is refused. `note`: for the coordinator's tables."""
    try:
        request = ReceiptRequest.model_validate_json(request_json)
        if request.site != site:
            raise LedgerError(f"{site} asks for a receipt in the name of {request.site}")
        signer = LedgerCountersigner(home / "receipts", keys.load_key(home / "key.pem"))
        receipt = signer.countersign(request)
        if on_receipt is not None:
            on_receipt(receipt)
        return json.dumps({"receipt": receipt.model_dump(mode="json")})
    except ValidationError:
        return json.dumps({"refused": "this is no request for a receipt; is the site of the same version?"})
    except HemofedError as error:
        return json.dumps({"refused": str(error)})
