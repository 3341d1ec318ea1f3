"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

StudyArgument = Annotated[str, typer.Argument(help="Study file or packaged study (see `hemofed study list`)")]
OverridesOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override of a study key, e.g. local.lr=0.1; repeatable"),
]
DataOption = Annotated[Path | None, typer.Option("--data", envvar="HEMOFED_DATA", help="Folder of the data sets")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON only")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Hide progress")]
