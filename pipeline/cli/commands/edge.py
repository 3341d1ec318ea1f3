"""`hemofed edge verify | show | serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploy.bundle.bundle import Bundle, Precision
from deploy.bundle.ood_guard import DRIFTED
from deploy.bundle.trust_store import Trust, read_key
from deploy.inference.local_calibration import Lab, keep, lab_for, measure, read_labelled
from deploy.inference.runtime import Runtime
from deploy.slide.prevalence import NOTICE
from deploy.slide.reader import cutting
from pipeline.cli.output import console, errors, print_json, table
from privacy.ledger.keys import fingerprint

HOST = "127.0.0.1"


def verify_command(path: Path, data: Path, keeps: bool, precision: Precision | None, threads: int, json: bool) -> None:
    bundle = Bundle.open(path, Trust.here())
    runtime = Runtime(bundle, precision, threads)
    with errors.status("reading labelled cells") as status:
        labelled = read_labelled(
            data, bundle, lambda done, all_: status.update(f"reading labelled cells: {done} of {all_}")
        )
        told, found = measure(runtime, labelled)
    lab, why = (found, None) if isinstance(found, Lab) else (None, found)
    kept = str(keep(lab)) if lab and keeps else None
    told |= {"skipped": list(labelled.skipped), "kept": kept, "why_not": why or (lab.unfit if lab else None), "notice": NOTICE,
             "lab": lab.model_dump(mode="json", exclude={"reference", "colours"}) if lab else None}  # fmt: skip
    if json:
        print_json(told)
        return
    _show(bundle, told, lab)
    if told["drift"] is not None and told["drift"] > DRIFTED:
        console.print(
            f"warning: these cells look unlike those it was validated on (drift {told['drift']:.2f}); is each of them cut as "
            f"{cutting(bundle)}?", style="yellow", soft_wrap=True,
        )  # fmt: skip
    if why is not None:
        before = lab_for(bundle, precision)
        stays = f"this lab's measurement of {before.made} stays" if before else "the bundle's own figures stay"
        console.print(f"{why}; {stays}", style="yellow", soft_wrap=True)
    elif lab is not None and lab.unfit:
        kept_words = "; from now on this machine gives no verdict by it, until it is measured anew" if kept else ""
        console.print(f"{lab.unfit}; are the labels right? Do not use it here{kept_words}", style="red", soft_wrap=True)
    elif kept:
        console.print(f"from now on this machine uses these: {kept}", soft_wrap=True)
    console.print(NOTICE)


def _show(bundle: Bundle, told: dict[str, Any], lab: Lab | None) -> None:
    for line in told["skipped"]:
        console.print(f"not read: {line}", style="yellow", soft_wrap=True)
    promised = told.get("promised", {})
    rows = [["labelled cells", f"{told['cells']:,}", ""], ["not answered for", f"{100 * told['refused']:.1f} %", ""]]
    for key in ("accuracy", "balanced_accuracy", "auroc", "sensitivity", "specificity"):
        if told.get(key) is not None:
            said = promised.get(key)
            rows.append([key.replace("_", " "), f"{told[key]:.4f}", "–" if said is None else f"{said:.4f}"])
    console.print(table([f"{bundle.manifest.name} here", "measured", "its card says"], rows))
    if lab is not None and not lab.unfit:
        cal = lab.calibration
        points = [[p.name, f"{p.probability:.4f}", f"{p.sensitivity:.4f}", f"{p.specificity:.4f}"] for p in cal.points]
        console.print(table(["for this lab", "probability", "sensitivity", "specificity"], points))
        console.print(f"temperature {bundle.calibration.temperature:.3f} -> {cal.temperature:.3f}, loss {cal.loss_before:.4f} -> {cal.loss:.4f}")  # fmt: skip


def show_command(path: Path, json: bool) -> None:
    bundle = Bundle.open(path, Trust.here())
    if json:
        print_json({"digest": bundle.digest, "signer": bundle.signer, "bundle": bundle.manifest.model_dump(mode="json"), "card": bundle.card,
                    "points": [p.told() for p in bundle.calibration.points]})  # fmt: skip
        return
    console.print(f"{bundle.title}: signature good, by {bundle.signer}", soft_wrap=True)
    for lab in filter(None, (lab_for(bundle, precision) for precision in bundle.manifest.precisions)):
        said = (
            f"not to be used here: {lab.unfit}"
            if lab.unfit
            else f"this machine has its own figures: {lab.calibration.measured_on}"
        )
        console.print(f"{lab.precision}: {said} ({lab.made})", soft_wrap=True)
    console.print(f"a single cell is {cutting(bundle)}\n", soft_wrap=True)
    console.print(bundle.files["card.md"].decode(), soft_wrap=True)


def serve_command(path: Path, port: int, precision: Precision | None, delivered: bool, threads: int) -> None:
    from deploy.app.serve import serve

    bundle = Bundle.open(path, Trust.here())
    runtime = Runtime(bundle, precision, threads, None if delivered else lab_for(bundle, precision))
    serve(
        runtime,
        HOST,
        port,
        lambda url: console.print(f"{bundle.title} at {url} ({NOTICE}); Ctrl-C ends it", soft_wrap=True),
    )


# `hemofed trust add | list | remove`.


def add_command(name: str, key: str, json: bool) -> None:
    public, trust = read_key(key), Trust.here()
    trust.add(name, public)
    mark = fingerprint(bytes.fromhex(public))
    if json:
        print_json({"name": name, "key": public, "fingerprint": mark, "file": str(trust.path)})
        return
    console.print(f"pinned {name}: {mark}", soft_wrap=True)
    console.print("have its owner read this fingerprint to you, by another way than the bundle came", soft_wrap=True)


def list_command(json: bool) -> None:
    trust = Trust.here()
    found = [{"name": n, "key": k, "fingerprint": fingerprint(bytes.fromhex(k))} for n, k in trust.keys().items()]
    if json:
        print_json(found)
    elif found:
        console.print(table(["name", "fingerprint"], [[row["name"], row["fingerprint"]] for row in found], words=2))
    else:
        console.print(f"no key is pinned ({trust.path}); hemofed trust add NAME KEY", soft_wrap=True)


def remove_command(name: str) -> None:
    Trust.here().remove(name)
    console.print(f"removed {name}")
