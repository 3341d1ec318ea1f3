"""A site's request for a receipt, and the coordinator's answer, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from pipeline.core.errors import BadLedger, HemofedError
from privacy.ledger import keys
from privacy.ledger.countersigner import Countersigner
from privacy.ledger.receipts import Request
from privacy.ledger.records import Receipt


def countersigned(home: Path, site: str, asked: str, note: Callable[[Receipt], None] | None = None) -> str:
    """`site`: whose connection it came by; a request in another's name is refused. `note`: for the coordinator's tables."""
    try:
        request = Request.model_validate_json(asked)
        if request.site != site:
            raise BadLedger(f"{site} asks for a receipt in the name of {request.site}")
        signer = Countersigner(home / "receipts", keys.load(home / "key.pem"))
        receipt = signer.countersign(request)
        if note is not None:
            note(receipt)
        return json.dumps({"receipt": receipt.model_dump(mode="json")})
    except ValidationError:
        return json.dumps({"refused": "this is no request for a receipt; is the site of the same version?"})
    except HemofedError as error:
        return json.dumps({"refused": str(error)})


def read_receipt(answer: str) -> Receipt:
    try:
        told = json.loads(answer)
        if "refused" in told:
            raise BadLedger(f"the coordinator refuses its receipt: {told['refused']}")
        return Receipt.model_validate_json(json.dumps(told["receipt"]))
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise BadLedger("the coordinator's answer is no receipt; is it of the same version?") from error
