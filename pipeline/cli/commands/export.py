"""`hemofed export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploy.export.export import LICENSE_NOT_STATED, ExportResult, check_export, export_bundle
from deploy.export.model_card import format_rate
from deploy.export.signing_key import load_signing_key
from pipeline.cli.output import build_table, console, print_json, stderr_console
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import StudyError


def export_command(
    run: Path,
    out: Path,
    model: str | None,
    site: str | None,
    int8: bool,
    key: Path | None,
    license_text: str | None,
    field_scale: tuple[float | None, float | None],
    quiet: bool,
    json: bool,
) -> None:
    if model and site:
        raise StudyError("--model and --site exclude each other; give one of them")
    model_name = f"site/{site}" if site else model or "global"
    run_folder = RunFolder.open(run)
    check_export(run_folder, model_name, out, field_scale)  # before a key is created
    signing_key = load_signing_key(key, _tell_about_new_key)
    with stderr_console.status("exporting") as status:
        exported = export_bundle(
            run_folder=run_folder,
            model_name=model_name,
            output_folder=out,
            signing_key=signing_key,
            with_int8=int8,
            license_text=license_text or LICENSE_NOT_STATED,
            crop_and_diameter_px=field_scale,
            report_progress=_ignore_status if quiet else status.update,
        )
    if json:
        print_json(_export_to_dict(exported))
        return
    for warning in exported.warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    if exported.calibration.operating_points:
        rows = [
            [p.name, f"{p.probability:.4f}", format_rate(p, True), format_rate(p, False)]
            for p in exported.calibration.operating_points
        ]
        console.print(build_table(["point", "probability", "sensitivity", "specificity"], rows))
    parity = exported.model_card["export"]["parity"]
    console.print(
        f"the outputs of the ONNX graph and of the network differ by at most {parity['largest']:.1e} on {parity['images']} images; {exported.model_card['export']['int8']['words']}",
        soft_wrap=True,
    )
    console.print(f"wrote {exported.folder} and {exported.zip_path}", soft_wrap=True)
    console.print(
        f"to use it on another machine, pin its key there: hemofed trust add NAME {exported.public_key}", soft_wrap=True
    )


def _ignore_status(text: str) -> None:
    return None


def _tell_about_new_key(path: Path) -> None:
    stderr_console.print(f"created a key to sign bundles: {path}; keep a copy of it", soft_wrap=True)


def _export_to_dict(exported: ExportResult) -> dict[str, Any]:
    return {
        "bundle": str(exported.folder),
        "zip": str(exported.zip_path),
        "digest": exported.digest,
        "key": exported.public_key,
        "card": exported.model_card,
        "temperature": exported.calibration.temperature,
        "points": [p.to_dict() for p in exported.calibration.operating_points],
        "guard": exported.ood_reference.model_dump() if exported.ood_reference else None,
        "warnings": list(exported.warnings),
    }
