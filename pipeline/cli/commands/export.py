"""`hemofed export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from platformdirs import user_data_path

from deploy.export.export import UNLICENSED, Exported, export
from deploy.export.model_card import rate
from pipeline.cli.output import console, errors, print_json, table
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import BadStudy
from privacy.ledger import keys


def export_command(
    run: Path,
    out: Path,
    model: str | None,
    site: str | None,
    int8: bool,
    key: Path | None,
    licence: str | None,
    scale: tuple[float | None, float | None],
    quiet: bool,
    json: bool,
) -> None:
    if model and site:
        raise BadStudy("give either --model or --site")
    name = f"site/{site}" if site else model or "global"
    signer = signing_key(key)
    with errors.status("exporting") as status:
        say = _silent if quiet else status.update
        made = export(RunFolder.open(run), name, out, signer, int8, licence or UNLICENSED, scale, say)
    if json:
        print_json(_told(made))
        return
    for warning in made.warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    if made.calibration.points:
        rows = [[p.name, f"{p.probability:.4f}", rate(p, True), rate(p, False)] for p in made.calibration.points]
        console.print(table(["point", "probability", "sensitivity", "specificity"], rows))
    parity = made.card["export"]["parity"]
    console.print(
        f"the graph and the network agree to {parity['largest']:.1e} on {parity['images']} images; {made.card['export']['int8']['words']}",
        soft_wrap=True,
    )
    console.print(f"wrote {made.folder} and {made.zip}", soft_wrap=True)
    console.print(f"to use it elsewhere, pin its key there: hemofed trust add NAME {made.key}", soft_wrap=True)


def _silent(text: str) -> None:
    return None


def signing_key(path: Path | None) -> Ed25519PrivateKey:
    if path is not None:
        return keys.load(path)
    own = user_data_path("hemofed") / "signing.pem"
    if not own.exists():
        keys.save(keys.generate(), own)
        errors.print(f"made a key to sign bundles with: {own}; keep a copy of it", soft_wrap=True)
    return keys.load(own)


def _told(made: Exported) -> dict[str, Any]:
    return {"bundle": str(made.folder), "zip": str(made.zip), "digest": made.digest, "key": made.key, "card": made.card,
            "temperature": made.calibration.temperature, "points": [p.told() for p in made.calibration.points],
            "guard": made.reference.model_dump() if made.reference else None, "warnings": list(made.warnings)}  # fmt: skip
