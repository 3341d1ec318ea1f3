"""`hemofed edge calibrate | show | serve` and `hemofed trust add | list | remove`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploy.bundle.bundle import ModelBundle, Precision
from deploy.bundle.crop import describe_crop
from deploy.bundle.notice import RESEARCH_USE_NOTICE
from deploy.bundle.ood_guard import MAX_DRIFT
from deploy.bundle.trust_store import TrustStore, read_public_key
from deploy.inference.local_calibration import (
    LocalCalibration,
    load_local_calibration,
    measure_bundle,
    read_labeled_cells,
    save_local_calibration,
)
from deploy.inference.runtime import BundleRuntime
from pipeline.cli.output import build_table, console, print_json, stderr_console
from privacy.ledger.keys import fingerprint

LOOPBACK_HOST = "127.0.0.1"


def calibrate_command(
    bundle_path: Path, data: Path, should_save: bool, precision: Precision | None, num_threads: int, json: bool
) -> None:
    bundle = ModelBundle.open(bundle_path, TrustStore.open_default())
    runtime = BundleRuntime(bundle, precision, num_threads)
    with stderr_console.status("reading labelled cells") as status:
        labeled_cells = read_labeled_cells(
            data, bundle, lambda done, total: status.update(f"reading labelled cells: {done} of {total}")
        )
        report, calibration_or_reason = measure_bundle(runtime, labeled_cells)
    local_calibration = calibration_or_reason if isinstance(calibration_or_reason, LocalCalibration) else None
    failure_reason = None if isinstance(calibration_or_reason, LocalCalibration) else calibration_or_reason
    saved_path = str(save_local_calibration(local_calibration)) if local_calibration and should_save else None
    report |= {
        "skipped": list(labeled_cells.skipped),
        "kept": saved_path,
        "why_not": failure_reason or (local_calibration.unfit_reason if local_calibration else None),
        "notice": RESEARCH_USE_NOTICE,
        "lab": local_calibration.model_dump(mode="json", exclude={"ood_reference", "color_tables"})
        if local_calibration
        else None,
    }
    if json:
        print_json(report)
        return
    _print_calibration(bundle, report, local_calibration)
    if report["drift"] is not None and report["drift"] > MAX_DRIFT:
        console.print(
            f"warning: these cells differ from those that the model was validated on (drift {report['drift']:.2f}); check "
            f"that each image is {describe_crop(bundle)}",
            style="yellow",
            soft_wrap=True,
        )
    if failure_reason is not None:
        previous = load_local_calibration(bundle, precision)
        fallback_text = (
            f"this lab's calibration of {previous.created} stays in use"
            if previous
            else "the bundle's own operating points stay in use"
        )
        console.print(f"{failure_reason}; {fallback_text}", style="yellow", soft_wrap=True)
    elif local_calibration is not None and local_calibration.unfit_reason:
        saved_note = "; this machine gives no verdict with it until it is calibrated again" if saved_path else ""
        console.print(
            f"{local_calibration.unfit_reason}; check the labels. Do not use the bundle here{saved_note}",
            style="red",
            soft_wrap=True,
        )
    elif saved_path:
        console.print(f"this machine now uses this calibration: {saved_path}", soft_wrap=True)
    console.print(RESEARCH_USE_NOTICE)


def _print_calibration(bundle: ModelBundle, report: dict[str, Any], local_calibration: LocalCalibration | None) -> None:
    for line in report["skipped"]:
        console.print(f"not read: {line}", style="yellow", soft_wrap=True)
    card_metrics = report.get("promised", {})
    rows = [
        ["labelled cells", f"{report['cells']:,}", ""],
        ["refused", f"{100 * report['refused']:.1f} %", ""],
    ]
    for key in ("accuracy", "balanced_accuracy", "auroc", "sensitivity", "specificity"):
        if report.get(key) is not None:
            card_value = card_metrics.get(key)
            rows.append(
                [key.replace("_", " "), f"{report[key]:.4f}", "–" if card_value is None else f"{card_value:.4f}"]
            )
    console.print(build_table([bundle.manifest.name, "measured here", "model card"], rows))
    if local_calibration is not None and not local_calibration.unfit_reason:
        calibration = local_calibration.calibration
        points = [
            [p.name, f"{p.probability:.4f}", f"{p.sensitivity:.4f}", f"{p.specificity:.4f}"]
            for p in calibration.operating_points
        ]
        console.print(build_table(["this lab's point", "probability", "sensitivity", "specificity"], points))
        console.print(
            f"temperature {bundle.calibration.temperature:.3f} -> {calibration.temperature:.3f}, loss {calibration.loss_before:.4f} -> {calibration.loss:.4f}"
        )


def show_command(bundle_path: Path, json: bool) -> None:
    bundle = ModelBundle.open(bundle_path, TrustStore.open_default())
    if json:
        print_json(
            {
                "digest": bundle.digest,
                "signer": bundle.signer,
                "bundle": bundle.manifest.model_dump(mode="json"),
                "card": bundle.model_card,
                "points": [p.to_dict() for p in bundle.calibration.operating_points],
            }
        )
        return
    console.print(f"{bundle.title}: valid signature by {bundle.signer}", soft_wrap=True)
    for local_calibration in filter(
        None, (load_local_calibration(bundle, precision) for precision in bundle.manifest.precisions)
    ):
        usage_text = (
            f"must not be used here: {local_calibration.unfit_reason}"
            if local_calibration.unfit_reason
            else f"calibrated on this machine: {local_calibration.calibration.measured_on}"
        )
        console.print(f"{local_calibration.precision}: {usage_text} ({local_calibration.created})", soft_wrap=True)
    console.print(f"an image of a single cell is {describe_crop(bundle)}\n", soft_wrap=True)
    console.print(bundle.files["card.md"].decode(), soft_wrap=True)


def serve_command(
    bundle_path: Path, port: int, precision: Precision | None, ignore_local_calibration: bool, num_threads: int
) -> None:
    from deploy.app.serve import serve_edge_app

    bundle = ModelBundle.open(bundle_path, TrustStore.open_default())
    runtime = BundleRuntime(
        bundle, precision, num_threads, None if ignore_local_calibration else load_local_calibration(bundle, precision)
    )
    serve_edge_app(
        runtime,
        LOOPBACK_HOST,
        port,
        lambda url: console.print(f"{bundle.title} at {url} ({RESEARCH_USE_NOTICE}); Ctrl-C stops it", soft_wrap=True),
    )


def trust_add_command(name: str, key: str, json: bool) -> None:
    public_key, trust_store = read_public_key(key), TrustStore.open_default()
    trust_store.add(name, public_key)
    key_fingerprint = fingerprint(bytes.fromhex(public_key))
    if json:
        print_json({"name": name, "key": public_key, "fingerprint": key_fingerprint, "file": str(trust_store.path)})
        return
    console.print(f"pinned {name}: {key_fingerprint}", soft_wrap=True)
    console.print(
        "compare this fingerprint with its owner over another channel than the bundle came by", soft_wrap=True
    )


def trust_list_command(json: bool) -> None:
    trust_store = TrustStore.open_default()
    pinned_keys = [
        {"name": n, "key": k, "fingerprint": fingerprint(bytes.fromhex(k))} for n, k in trust_store.load_keys().items()
    ]
    if json:
        print_json(pinned_keys)
    elif pinned_keys:
        console.print(
            build_table(
                ["name", "fingerprint"], [[row["name"], row["fingerprint"]] for row in pinned_keys], num_text_columns=2
            )
        )
    else:
        console.print(
            f"no key is pinned in {trust_store.path}; pin one with: hemofed trust add NAME KEY", soft_wrap=True
        )


def trust_remove_command(name: str) -> None:
    TrustStore.open_default().remove(name)
    console.print(f"removed {name}")
