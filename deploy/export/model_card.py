"""The model card: card.json, the same as Markdown, and metadata.json in the format of MONAI's bundles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from deploy.bundle.calibration import ModelCalibration
from deploy.bundle.notice import RESEARCH_USE_NOTICE
from deploy.bundle.ood_guard import OodReference
from deploy.bundle.operating_points import OperatingPoint
from pipeline.coordinator.run_folder import RunFolder
from pipeline.records.run_results import RunResults
from pipeline.records.scores import EvaluationScores, ModelMetrics
from pipeline.records.sites_record import SitesRecord
from pipeline.study.privacy import PrivacyConfig

JsonDict = dict[str, Any]
CARD_METRICS = ("n", "accuracy", "balanced_accuracy", "auroc", "positive_auroc", "positive_auprc", "sensitivity_at_specificity",
         "calibration_error")  # fmt: skip
INTENDED_USE = (
    "To support a trained person, who looks at the cells that the model flags and decides. "
    "Never the only reason for or against a diagnosis."
)
LIMITATIONS = (
    (
        "It was trained on its sites' images only: it is not valid for other stains, cameras, magnifications and diseases. Measure it "
        "on labelled cells of your own (`hemofed edge calibrate`) before you use it."
    ),
    (
        "Its probabilities hold for the class frequencies of the validation images; on a slide where a class is rarer they are "
        "too high."
    ),
    (
        "Error rates of operating points were measured on the images by which the threshold was chosen, so they are slightly "
        "optimistic."
    ),
    "Labels of single cells differ between experts: of cells labelled twice in a public set, 12 % got two labels.",
)


def build_card(run_folder: RunFolder, model_name: str, header: Mapping[str, Any], license_text: str) -> JsonDict:
    """The card of the run; `export_bundle` adds its own measurements."""
    study, path = run_folder.load_study(), run_folder.path
    results, sites = RunResults.read(path), SitesRecord.read(path)
    return {
        "name": study.name,
        "description": study.description,
        "model": model_name,
        "notice": RESEARCH_USE_NOTICE,
        "task": {
            "classes": list(header["classes"]),
            "positive_class": study.evaluation.positive_class,
            "data": study.data.name,
        },
        "data": sites.to_dict()["sites"],
        "training": {
            "network": study.model.name,
            "num_parameters": results.num_parameters,
            "strategy": study.strategy.name,
            "rounds": results.rounds,
            "best_round": results.best_round,
            "selected_by": results.selected_by,
            "study": study.hash,
            "normalization": study.normalization.name,
        },
        "metrics": _collect_metrics(results.test, model_name),
        "privacy": _describe_privacy(run_folder),
        "intended_use": INTENDED_USE,
        "limits": list(LIMITATIONS),
        "license": license_text,
        "software": dict(results.software),
    }


def _collect_metrics(test_scores: EvaluationScores, model_name: str) -> JsonDict:
    """Test metrics: of the global model, or else of the models that the sites evaluated."""
    view = test_scores.comparison("global") if model_name == "global" and test_scores.comparisons else test_scores
    overall = {"coordinator": view.coordinator, "pooled": view.pooled}
    metrics = {source: _select_metrics(metrics) for source, metrics in overall.items() if metrics}
    return metrics | {"sites": {site: _select_metrics(site_metrics) for site, site_metrics in view.sites.items()}}


def _select_metrics(metrics: ModelMetrics) -> JsonDict:
    recorded = metrics.to_dict()
    return {key: recorded[key] for key in CARD_METRICS if key in recorded}


def _describe_privacy(run_folder: RunFolder) -> JsonDict:
    privacy = run_folder.load_study().privacy
    if privacy == PrivacyConfig():
        return {"guarantee": "none: the study asks for no formal privacy"}
    epsilon_by_site = dict(next((r.epsilon for r in reversed(run_folder.load_rounds()) if r.epsilon), {}))
    dp_sgd = privacy.dp_sgd
    return {
        "guarantee": "differential privacy of training"
        if dp_sgd or privacy.client_level_dp
        else "secure aggregation without noise",
        "unit": dp_sgd.privacy_unit if dp_sgd else "site" if privacy.client_level_dp else None,
        "delta": dp_sgd.delta if dp_sgd else privacy.client_level_dp.delta if privacy.client_level_dp else None,
        "epsilon": epsilon_by_site,
        "secure_aggregation": privacy.secure_aggregation is not None,
        "not_covered": "temperature, operating points and the out-of-distribution reference, from sums over validation images without noise",
    }


def render_markdown(model_card: JsonDict, calibration: ModelCalibration, ood_reference: OodReference | None) -> str:
    return "\n".join(_render_lines(model_card, calibration, ood_reference)) + "\n"


def _render_lines(
    model_card: JsonDict, calibration: ModelCalibration, ood_reference: OodReference | None
) -> Iterator[str]:
    task, training = model_card["task"], model_card["training"]
    yield f"# {model_card['name']}: {model_card['model']}\n"
    yield f"**{model_card['notice'].capitalize()}.**\n"
    description = model_card["description"] or "A classifier of images"
    description += "" if description.endswith(("?", "!", ".")) else "."
    yield f"{description} Its classes are {', '.join(task['classes'])}." + (
        f" The positive class is {task['positive_class']}." if task["positive_class"] else ""
    )
    yield f"\n## Use\n\n{model_card['intended_use']}\n\n## Limits\n"
    yield from (f"- {limit}" for limit in model_card["limits"])
    yield "\n## Training\n"
    yield (
        f"{training['network']} ({training['num_parameters']:,} parameters), {training['strategy']}, round {training['best_round']} of "
        f"{training['rounds']} ({training['selected_by']}); study {training['study'][:12]}.\n"
    )
    yield "| site | train | val | test |\n|---|---|---|---|"
    for site, site_counts in model_card["data"].items():
        yield (
            f"| {site} | "
            + " | ".join(_format_total(site_counts.get(split)) for split in ("train", "val", "test"))
            + " |"
        )
    yield "\n## Test metrics\n\nOn test images, evaluated once.\n"
    yield from _render_metrics_table(model_card["metrics"])
    yield "\n## Operating points\n"
    yield from _render_operating_points(calibration)
    yield "\n## Out-of-distribution guard\n"
    yield from _render_ood_guard(ood_reference)
    yield "\n## Privacy\n"
    yield from _render_privacy(model_card["privacy"])
    export_record = model_card["export"]
    yield "\n## This file\n"
    yield (
        f"Made {export_record['made']} by hemofed {export_record['hemofed']}, opset {export_record['opset']}, onnxruntime {export_record['onnxruntime']}. The graph and "
        f"the network differ by at most {export_record['parity']['largest']:.1e} on {export_record['parity']['images']} images. {export_record['int8']['words']}"
    )
    yield f"\nLicense: {model_card['license']}"


def _format_total(counts: Any) -> str:
    return "–" if counts is None else f"{sum(counts) if isinstance(counts, list) else counts:,}"


def _render_metrics_table(metrics: JsonDict) -> Iterator[str]:
    rows = {source: metrics[source] for source in ("coordinator", "pooled") if source in metrics} | metrics["sites"]
    if not rows:
        yield "No test metrics."
        return
    columns = [key for key in CARD_METRICS if any(row.get(key) is not None for row in rows.values())]
    yield "| | " + " | ".join(key.replace("_", " ") for key in columns) + " |\n|---" + "|---" * len(columns) + "|"
    for source, row in rows.items():
        cells = ("–" if row.get(k) is None else f"{row[k]:,}" if k == "n" else f"{row[k]:.3f}" for k in columns)
        yield f"| {source} | " + " | ".join(cells) + " |"


def _render_operating_points(calibration: ModelCalibration) -> Iterator[str]:
    if not calibration.operating_points:
        yield "There are no operating points: the study names no positive class, or no validation image shows it."
        return
    yield f"Measured on {calibration.measured_on}; temperature {calibration.temperature:.3f}.\n"
    yield "| point | probability | sensitivity | specificity | spread of both between sites |\n|---|---|---|---|---|"
    for point in calibration.operating_points:
        yield f"| {point.name} | {point.probability:.4f} | {format_rate(point, True)} | {format_rate(point, False)} | {format_spread(point)} |"


def format_rate(operating_point: OperatingPoint, of_positives: bool) -> str:
    num_correct, total = (
        (operating_point.tp, operating_point.tp + operating_point.fn)
        if of_positives
        else (operating_point.tn, operating_point.tn + operating_point.fp)
    )
    return f"{num_correct / total:.4f} ({num_correct:,} of {total:,})" if total else "–"


def format_spread(operating_point: OperatingPoint) -> str:
    """Standard deviations between sites, beyond chance."""
    return f"±{operating_point.sensitivity_spread:.2g}, ±{operating_point.specificity_spread:.2g}"


def _render_ood_guard(ood_reference: OodReference | None) -> Iterator[str]:
    if ood_reference is None:
        yield "The model accepts every image: the bundle has no out-of-distribution reference."
        return
    yield (
        f"The guard rejects an image if its features, brightness, contrast, sharpness or colors are outside the range of {ood_reference.num_images:,} "
        f"validation images. It would reject at most {100 * ood_reference.false_alarm_rate:.1f} % of those images themselves; it may reject all cells of a slide "
        "with other colors. Of rendered images:\n"
    )
    yield "| image | rejected |\n|---|---|"
    yield from (f"| {corruption} | {100 * rate:.0f} % |" for corruption, rate in ood_reference.detection_rates.items())


def _render_privacy(privacy: JsonDict) -> Iterator[str]:
    yield f"{privacy['guarantee'].capitalize()}."
    if privacy.get("unit"):
        max_epsilon = max(privacy["epsilon"].values(), default=None)
        epsilon_text = f"at most {max_epsilon:.4g}" if max_epsilon is not None else "see the audit report"
        yield f"Epsilon {epsilon_text} for each {privacy['unit']}, at delta {privacy['delta']:g}. Not covered: {privacy['not_covered']}."


def build_monai_metadata(model_card: JsonDict, input_size: tuple[int, int]) -> JsonDict:
    import monai
    import numpy
    import torch

    channel_names = {str(n): name for n, name in enumerate(model_card["task"]["classes"])}
    common = {"is_patch_data": False}
    return {
        "schema": "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json",
        "version": version("hemofed"),
        "changelog": {version("hemofed"): f"exported from study {model_card['training']['study'][:12]}"},
        "monai_version": monai.__version__,
        "pytorch_version": torch.__version__.split("+")[0],
        "numpy_version": numpy.__version__,
        "required_packages_version": {"onnxruntime": version("onnxruntime")},
        "name": model_card["name"],
        "task": "classification of images of single blood cells"
        if "smear" in model_card["task"]["data"]
        else "classification of images",
        "description": model_card["description"] or model_card["name"],
        "authors": "the study's sites",
        "copyright": model_card["license"],
        "intended_use": f"{model_card['notice']}. {model_card['intended_use']}",
        "data_source": model_card["task"]["data"],
        "data_type": "8-bit RGB",
        "eval_metrics": model_card["metrics"].get("pooled") or model_card["metrics"].get("coordinator") or {},
        "network_data_format": {
            "inputs": {
                "image": {
                    "type": "image",
                    "format": "rgb",
                    "num_channels": 3,
                    "spatial_shape": list(input_size),
                    "dtype": "uint8",
                    "value_range": [0, 255],
                    "channel_def": {"0": "red", "1": "green", "2": "blue"},
                    **common,
                }
            },
            "outputs": {
                "pred": {
                    "type": "probabilities",
                    "format": "classification",
                    "num_channels": len(channel_names),
                    "spatial_shape": [],
                    "dtype": "float32",
                    "value_range": [0, 1],
                    "channel_def": channel_names,
                    **common,
                }
            },
        },
    }
