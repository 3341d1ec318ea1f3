"""What a person has to know of a model before using it: card.json, the same in words, and as MONAI's bundles say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from deploy.bundle.ood_guard import Reference
from deploy.bundle.operating_points import Calibration, Point
from deploy.slide.prevalence import NOTICE
from pipeline.coordinator.run_folder import RunFolder
from pipeline.study.privacy import Privacy

Json = dict[str, Any]
SHOWN = ("n", "accuracy", "balanced_accuracy", "auroc", "positive_auroc", "positive_auprc", "sensitivity_at_specificity",
         "calibration_error")  # fmt: skip
USE = (
    "To help a trained person look: cells that the model points out are to be looked at by that person, who decides. "
    "Never the only ground for or against a diagnosis."
)
LIMITS = (
    (
        "It knows only what its sites showed it: other stains, cameras, magnifications and diseases are outside. Measure it "
        "on labelled cells of your own (`hemofed edge verify`) before you use it."
    ),
    "Its probabilities belong to the mix of cells that it was validated on; on a slide with fewer of a kind they are too high.",
    (
        "Error rates of operating points were read from the images by which the threshold was chosen, so they are a little "
        "too good."
    ),
    "Labels of single cells differ between experts: of cells labelled twice in a public set, 12 % got two labels.",
)


def facts(folder: RunFolder, name: str, header: Mapping[str, Any], licence: str) -> Json:
    """Of the run; what the export itself measured is added to it."""
    study, results, sites = folder.study(), folder.read_json("results.json"), folder.read_json("sites.json")
    return {
        "name": study.name,
        "about": study.about,
        "model": name,
        "notice": NOTICE,
        "task": {"classes": list(header["classes"]), "positive": study.evaluation.positive, "data": study.data.name},
        "data": {site: _counts(held) for site, held in sites["sites"].items()},
        "training": {
            "network": study.model.name,
            "parameters": results["parameters"],
            "strategy": study.strategy.name,
            "rounds": results["rounds"],
            "best_round": results["best_round"],
            "chosen_by": results["chosen_by"],
            "study": study.hash,
            "normalise": study.normalise.name,
        },
        "metrics": _metrics(results["test"], name),
        "privacy": _privacy(folder),
        "intended_use": USE,
        "limits": list(LIMITS),
        "licence": licence,
        "software": results["software"],
    }


def _counts(held: Mapping[str, Any]) -> dict[str, Any]:
    """Images by split, and by class where a site tells."""
    found = held.get("examples", held)
    return {split: found[split] for split in ("train", "val", "test") if split in found}


def _metrics(test: Mapping[str, Any], name: str) -> Json:
    """On test images, which were looked at once: of this model where it is the common one, else as its sites saw theirs."""
    view = test.get("views", {}).get("global", {}) if name == "global" and "views" in test else test
    kept = {who: _few(view[who]) for who in ("coordinator", "pooled") if who in view}
    return kept | {"sites": {site: _few(found) for site, found in view.get("sites", {}).items()}}


def _few(found: Mapping[str, Any]) -> Json:
    return {key: found[key] for key in SHOWN if key in found}


def _privacy(folder: RunFolder) -> Json:
    asked = folder.study().privacy
    if asked == Privacy():
        return {"promise": "none: no formal privacy was asked for"}
    spent: Json = next((r["epsilon"] for r in reversed(folder.rounds()) if r.get("epsilon")), {})
    at = asked.at_site
    return {
        "promise": "differential privacy of training" if at or asked.at_coordinator else "secure sums, no noise",
        "unit": at.unit if at else "site" if asked.at_coordinator else None,
        "delta": at.delta if at else asked.at_coordinator.delta if asked.at_coordinator else None,
        "epsilon": spent,
        "secure_sum": asked.secure_sum is not None,
        "outside": "temperature, operating points and the guard's reference come from sums over validation images, without noise",
    }


def in_words(card: Json, calibration: Calibration, reference: Reference | None) -> str:
    return "\n".join(_lines(card, calibration, reference)) + "\n"


def _lines(card: Json, calibration: Calibration, reference: Reference | None) -> Iterator[str]:
    task, trained = card["task"], card["training"]
    yield f"# {card['name']}: {card['model']}\n"
    yield f"**{card['notice'].capitalize()}.**\n"
    about = card["about"] or "A classifier of images"
    about += "" if about.endswith(("?", "!", ".")) else "."
    yield f"{about} It tells apart: {', '.join(task['classes'])}." + (
        f" What matters is {task['positive']}." if task["positive"] else ""
    )
    yield f"\n## Use\n\n{card['intended_use']}\n\n## Limits\n"
    yield from (f"- {limit}" for limit in card["limits"])
    yield "\n## Where it comes from\n"
    yield (
        f"{trained['network']} ({trained['parameters']:,} parameters), {trained['strategy']}, round {trained['best_round']} of "
        f"{trained['rounds']} ({trained['chosen_by']}); study {trained['study'][:12]}.\n"
    )
    yield "| site | train | val | test |\n|---|---|---|---|"
    for site, held in card["data"].items():
        yield f"| {site} | " + " | ".join(_total(held.get(split)) for split in ("train", "val", "test")) + " |"
    yield "\n## How good it is\n\nOn test images, looked at once.\n"
    yield from _table(card["metrics"])
    yield "\n## When a cell is called positive\n"
    yield from _points(calibration)
    yield "\n## When it does not answer\n"
    yield from _guard(reference)
    yield "\n## Privacy\n"
    yield from _promise(card["privacy"])
    made = card["export"]
    yield "\n## This file\n"
    yield (
        f"Made {made['made']} by hemofed {made['hemofed']}, opset {made['opset']}, onnxruntime {made['onnxruntime']}. The graph and "
        f"the network differ by at most {made['parity']['largest']:.1e} on {made['parity']['images']} images. {made['int8']['words']}"
    )
    yield f"\nLicence: {card['licence']}"


def _total(counts: Any) -> str:
    return "–" if counts is None else f"{sum(counts) if isinstance(counts, list) else counts:,}"


def _table(metrics: Json) -> Iterator[str]:
    rows = {who: metrics[who] for who in ("coordinator", "pooled") if who in metrics} | metrics["sites"]
    if not rows:
        yield "No test figures."
        return
    shown = [key for key in SHOWN if any(row.get(key) is not None for row in rows.values())]
    yield "| | " + " | ".join(key.replace("_", " ") for key in shown) + " |\n|---" + "|---" * len(shown) + "|"
    for who, row in rows.items():
        cells = ("–" if row.get(k) is None else f"{row[k]:,}" if k == "n" else f"{row[k]:.3f}" for k in shown)
        yield f"| {who} | " + " | ".join(cells) + " |"


def _points(calibration: Calibration) -> Iterator[str]:
    if not calibration.points:
        yield "There are no operating points: the study names no class that matters, or no validation image showed it."
        return
    yield f"Measured on {calibration.measured_on}; temperature {calibration.temperature:.3f}.\n"
    yield "| point | probability | sensitivity | specificity | both between sites, beyond chance |\n|---|---|---|---|---|"
    for point in calibration.points:
        yield f"| {point.name} | {point.probability:.4f} | {rate(point, True)} | {rate(point, False)} | {spread(point)} |"


def rate(point: Point, own: bool) -> str:
    hit, all_ = (point.tp, point.tp + point.fn) if own else (point.tn, point.tn + point.fp)
    return f"{hit / all_:.4f} ({hit:,} of {all_:,})" if all_ else "–"


def spread(point: Point) -> str:
    """Standard deviations between sites."""
    return f"±{point.sensitivity_spread:.2g}, ±{point.specificity_spread:.2g}"


def _guard(reference: Reference | None) -> Iterator[str]:
    if reference is None:
        yield "It answers for every image: there is no reference to hold images against."
        return
    yield (
        f"An image is refused if its features or its brightness, contrast, sharpness or colours lie outside of what {reference.images:,} "
        f"validation images showed. At most {100 * reference.false_alarms:.1f} % of those images themselves would be refused; a slide with other colours "
        "may be refused as a whole. Of rendered images:\n"
    )
    yield "| image | refused |\n|---|---|"
    yield from (f"| {what} | {100 * share:.0f} % |" for what, share in reference.catches.items())


def _promise(privacy: Json) -> Iterator[str]:
    yield f"{privacy['promise'].capitalize()}."
    if privacy.get("unit"):
        most = max(privacy["epsilon"].values(), default=None)
        told = f"at most {most:.4g}" if most is not None else "see the audit report"
        yield f"Epsilon {told} for each {privacy['unit']}, at delta {privacy['delta']:g}. Outside of it: {privacy['outside']}."


def monai_metadata(card: Json, size: tuple[int, int]) -> Json:
    import monai
    import numpy
    import torch

    named = {str(n): name for n, name in enumerate(card["task"]["classes"])}
    common = {"is_patch_data": False}
    return {
        "schema": "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json",
        "version": version("hemofed"),
        "changelog": {version("hemofed"): f"exported from study {card['training']['study'][:12]}"},
        "monai_version": monai.__version__,
        "pytorch_version": torch.__version__.split("+")[0],
        "numpy_version": numpy.__version__,
        "required_packages_version": {"onnxruntime": version("onnxruntime")},
        "name": card["name"],
        "task": "classification of images of single blood cells"
        if "smear" in card["task"]["data"]
        else "classification of images",
        "description": card["about"] or card["name"],
        "authors": "the study's sites",
        "copyright": card["licence"],
        "intended_use": f"{card['notice']}. {card['intended_use']}",
        "data_source": card["task"]["data"],
        "data_type": "8-bit RGB",
        "eval_metrics": card["metrics"].get("pooled") or card["metrics"].get("coordinator") or {},
        "network_data_format": {
            "inputs": {"image": {"type": "image", "format": "rgb", "num_channels": 3, "spatial_shape": list(size), "dtype": "uint8",
                                 "value_range": [0, 255], "channel_def": {"0": "red", "1": "green", "2": "blue"}, **common}},
            "outputs": {"pred": {"type": "probabilities", "format": "classification", "num_channels": len(named), "spatial_shape": [],
                                 "dtype": "float32", "value_range": [0, 1], "channel_def": named, **common}},
        },
    }  # fmt: skip
