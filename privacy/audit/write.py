"""Facts -> audit.html, audit.pdf and audit.json, side by side."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.core.files import write_atomically
from pipeline.reports.document.html import write_page
from pipeline.reports.document.pdf import write_pdf
from privacy.audit.document.report import report


def write_audit(facts: Mapping[str, Any], run: Path, out: Path) -> list[Path]:
    """`run`: where the pictures of attacks lie."""
    out.mkdir(parents=True, exist_ok=True)
    made = report(facts, run)
    text = json.dumps(plain(facts), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return [
        write_page(made, out / "audit.html"),
        write_pdf(made, out / "audit.pdf"),
        write_atomically(out / "audit.json", text.encode()),
    ]


def plain(value: Any) -> Any:
    """JSON knows no infinity."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
