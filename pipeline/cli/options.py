"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

OverridesOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. local.lr=0.1")
]
DataOption = Annotated[Path | None, typer.Option("--data", envvar="HEMOFED_DATA", help="Where data sets lie")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines, nothing else")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress")]
