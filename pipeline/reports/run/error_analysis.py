"""The report section on errors: confusion matrix, reliability, ROC and precision-recall curves, scores by class."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.records.scores import EvaluationScores, ModelMetrics, PrPoints, RocPoints
from pipeline.reports.document.formatting import format_integer, format_score
from pipeline.reports.document.page import ReportWriter, TableColumn
from pipeline.reports.run import scores as score_figures
from pipeline.reports.run.headline_metric import HeadlineMetric
from pipeline.reports.run.record import RunRecord

ConfusionCounts = Sequence[Sequence[int]]


def add_error_analysis_section(writer: ReportWriter, record: RunRecord, headline: HeadlineMetric) -> None:
    if record.results is None:
        return
    test_scores = headline.comparable_scores(record.results.test)
    data_label, main_metrics = headline.overall_scores(test_scores)
    classes = record.site_data.classes
    confusion_counts, reliability_bins = main_metrics.confusion, main_metrics.reliability
    if not confusion_counts and not reliability_bins:
        return
    writer.page.add_section("Error analysis").add_text(
        f"Test data: {data_label}."
        if not headline.has_several_models
        else f"Test data: {data_label}, each site with the model that it uses."
    )
    labels = (
        classes
        if len(classes) == len(confusion_counts or ())
        else [str(class_index) for class_index in range(len(confusion_counts or ()))]
    )
    _add_detection_curves(writer, headline, test_scores, main_metrics, labels, data_label)
    if confusion_counts:
        caption = (
            "Confusion matrix: rows are true classes, columns predicted classes; the colour is the fraction of the row."
        )
        writer.add_figure("confusion", score_figures.plot_confusion_matrix(labels, confusion_counts), caption)
    if reliability_bins:
        caption = (
            "Reliability: on the dotted line, accuracy equals confidence; below it, the model is overconfident. Vertical "
            "bars are 95 % intervals of a proportion, as if examples were independent; the lower panel counts the examples of each dot."
        )
        writer.add_figure(
            "reliability",
            score_figures.plot_reliability(reliability_bins),
            caption,
        )
    if confusion_counts:
        _add_class_table(writer, labels, confusion_counts, main_metrics.class_auroc or ())


def _add_class_table(
    writer: ReportWriter, labels: Sequence[str], confusion_counts: ConfusionCounts, class_aurocs: Sequence[float | None]
) -> None:
    """Sensitivity = correct / true examples, precision = correct / predicted ones; undefined if the divisor is 0."""
    rows = []
    for class_index, label in enumerate(labels):
        num_true, num_predicted, num_correct = (
            sum(confusion_counts[class_index]),
            sum(row[class_index] for row in confusion_counts),
            confusion_counts[class_index][class_index],
        )
        rates = [
            format_score("accuracy", num_correct / denominator if denominator else None)
            for denominator in (num_true, num_predicted)
        ]
        rows.append(
            [
                label,
                format_integer(num_true),
                *rates,
                *([format_score("auroc", class_aurocs[class_index])] if class_aurocs else []),
            ]
        )
    columns = [
        TableColumn("Class"),
        TableColumn("Examples", True),
        TableColumn("Sensitivity", True),
        TableColumn("Precision", True),
    ]
    writer.page.add_table([*columns, *([TableColumn("AUROC", True)] if class_aurocs else [])], rows, "Scores by class")


def _add_detection_curves(
    writer: ReportWriter,
    headline: HeadlineMetric,
    test_scores: EvaluationScores,
    main_metrics: ModelMetrics,
    labels: Sequence[str],
    data_label: str,
) -> None:
    positive_class = headline.positive_class or (labels[1] if len(labels) == 2 else None)
    if positive_class is None:
        return
    class_text = f"class “{positive_class}” against the rest"
    has_positive_class = main_metrics.headline_metric == "positive_auroc"
    auroc = main_metrics.positive_auroc if has_positive_class else main_metrics.auroc
    auprc = main_metrics.positive_auprc if has_positive_class else main_metrics.auprc
    roc, pr = main_metrics.roc, main_metrics.pr
    operating_point = (
        _find_operating_point(roc, headline.target_specificity) if roc and headline.positive_class else None
    )
    if roc and roc.fpr:
        site_curves = [metrics.roc for metrics in test_scores.sites.values() if metrics.roc and metrics.roc.fpr]
        point_text = (
            f"sensitivity {100 * operating_point[1]:.0f} % at {100 * headline.target_specificity:g} % specificity"
            if operating_point
            else ""
        )
        caption = f"ROC curve: {class_text}." + (
            " The ring marks the study's target specificity." if operating_point else ""
        )
        writer.add_figure(
            "roc",
            score_figures.plot_roc(
                curve=roc,
                area=auroc,
                site_curves=site_curves,
                operating_point=operating_point,
                point_text=point_text,
                curve_label=data_label,
            ),
            caption,
        )
    if pr and pr.recall:
        prevalence = _prevalence(main_metrics.confusion or (), labels, positive_class)
        precision_point = _precision_at_point(pr, operating_point)
        figure = score_figures.plot_precision_recall(pr, auprc, prevalence, precision_point, data_label)
        caption = f"Precision and sensitivity: {class_text}." + (
            " The ring is the same operating point." if precision_point else ""
        )
        writer.add_figure("precision_recall", figure, caption)


def _find_operating_point(curve: RocPoints, target_specificity: float) -> tuple[float, float] | None:
    """(1 - specificity, sensitivity) of highest sensitivity among thresholds that reach the target specificity."""
    roc_points = zip(curve.fpr, curve.tpr, strict=True)
    return max(
        (roc_point for roc_point in roc_points if roc_point[0] <= 1 - target_specificity + 1e-12),
        key=lambda p: (p[1], -p[0]),
        default=None,
    )


def _precision_at_point(curve: PrPoints, operating_point: tuple[float, float] | None) -> tuple[float, float] | None:
    """(sensitivity, precision): the highest precision at the operating point's sensitivity."""
    if operating_point is None or not operating_point[1]:
        return None
    pr_points = zip(curve.recall, curve.precision, strict=True)
    return max(
        (pr_point for pr_point in pr_points if abs(pr_point[0] - operating_point[1]) < 1e-9),
        key=lambda p: p[1],
        default=None,
    )


def _prevalence(confusion_counts: ConfusionCounts, labels: Sequence[str], positive_class: str) -> float | None:
    total = sum(map(sum, confusion_counts))
    return sum(confusion_counts[labels.index(positive_class)]) / total if total and positive_class in labels else None
