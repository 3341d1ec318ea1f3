"""HOME/unmasked_rounds.json: for each study, the last round of secure aggregation that the site helped to unmask."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from pipeline.core.errors import RunFolderError
from pipeline.core.files import write_atomically

UNMASKED_ROUNDS_FILE = "unmasked_rounds.json"
_FORMAT = TypeAdapter(dict[str, int])


def read_unmasked_rounds(home: Path) -> dict[str, int]:
    """Study hash -> last unmasked round, of all studies: runs of several studies may alternate at a site."""
    file = home / UNMASKED_ROUNDS_FILE
    try:
        return _FORMAT.validate_json(file.read_bytes()) if file.exists() else {}
    except ValidationError as error:
        raise RunFolderError(f"{file} is damaged; restore it from a backup (`hemofed site restore`)") from error


def write_unmasked_rounds(home: Path, last_round_by_study: Mapping[str, int]) -> None:
    write_atomically(home / UNMASKED_ROUNDS_FILE, json.dumps(last_round_by_study).encode())
