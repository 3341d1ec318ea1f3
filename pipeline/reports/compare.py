"""Several runs on one page: scores, curves in one figure, and the settings that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pipeline.core.errors import RunFolderError
from pipeline.protocol.tasks import Split
from pipeline.records.scores import EvaluatedAt
from pipeline.reports.document.figure_style import to_svg
from pipeline.reports.document.formatting import (
    METRIC_LABELS,
    PERCENT_METRICS,
    SPLIT_LABELS,
    UNDEFINED_TEXT,
    format_bytes,
    format_duration,
    format_integer,
    format_score,
    metric_label,
)
from pipeline.reports.document.page import HtmlPage, TableColumn
from pipeline.reports.run.curves import CurveSeries, mean_over_sites, plot_curves
from pipeline.reports.run.headline_metric import select_main_scores
from pipeline.reports.run.record import SPLIT_ORDER, RunRecord, Settings, load_run_record
from pipeline.reports.run.scores import BAND_DESCRIPTIONS

Evaluator = Literal[EvaluatedAt, "sites"]
ScoreSource = tuple[Split, Evaluator]
SOURCE_LABELS: Mapping[Evaluator, str] = {
    "coordinator": "evaluated at the coordinator",
    "sites": "mean over sites",
    "pooled": "pooled over all sites",
}
SCORE_SOURCES: Sequence[ScoreSource] = [(split, where) for where in SOURCE_LABELS for split in SPLIT_ORDER]


def write_comparison(
    runs: Sequence[Path], out_path: Path, metric: str = "accuracy"
) -> tuple[Path, list[dict[str, object]]]:
    """Writes the page and returns its path and its table in plain numbers.

    `out_path`: an .html file, or a folder that gets compare.html.
    """
    if metric not in METRIC_LABELS:
        raise RunFolderError(f"runs do not record a metric {metric!r}; valid: {', '.join(METRIC_LABELS)}")
    records = dict(zip(_unique_run_names(runs), map(load_run_record, runs), strict=True))
    rows = [_comparison_row(name, record, metric) for name, record in records.items()]
    page = HtmlPage(
        f"{len(runs)} runs compared" if len(runs) != 1 else "One run",
        f"By {metric_label(metric).lower()}",
        _unfinished_notice(records),
    )
    page.add_section("Scores").add_table(_comparison_columns(metric), [_format_row(row) for row in rows])
    _add_curves_section(page, records, metric)
    _add_differences_section(page, records)
    return page.save(out_path if out_path.suffix == ".html" else out_path / "compare.html"), rows


def _unique_run_names(runs: Sequence[Path]) -> list[str]:
    """Folder names, with the parent's name where two folders have the same one."""
    resolved_runs = [run.resolve() for run in runs]
    folder_names = [run.name for run in resolved_runs]
    parent_names = [f"{run.parent.name}/{run.name}" for run in resolved_runs]
    names = [
        parent_name if folder_names.count(folder_name) > 1 else folder_name
        for folder_name, parent_name in zip(folder_names, parent_names, strict=True)
    ]
    return [
        f"{name} ({names[:index].count(name) + 1})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def _unfinished_notice(records: Mapping[str, RunRecord]) -> str:
    running = [name for name, record in records.items() if record.results is None]
    return f"Not finished, scores of the last evaluated round: {', '.join(running)}." if running else ""


def _comparison_row(name: str, record: RunRecord, metric: str) -> dict[str, object]:
    split, scores = record.latest_scores()
    data_label, main_metrics = select_main_scores(scores)
    return {
        "name": name,
        "strategy": record.strategy_name,
        "best_round": record.results.best_round if record.results else None,
        "judged_on": f"{SPLIT_LABELS[split]}, {data_label}" if data_label else None,
        **{key: main_metrics.value(key) for key in dict.fromkeys([metric, "accuracy", "loss"])},
        "traffic": record.uplink_bytes + record.downlink_bytes,
        "seconds": record.seconds,
    }


def _comparison_columns(metric: str) -> list[TableColumn]:
    metric_columns = [TableColumn(metric_label(key), True) for key in dict.fromkeys([metric, "accuracy", "loss"])]
    return [
        TableColumn("Run"),
        TableColumn("Strategy"),
        TableColumn("Best round", True),
        TableColumn("Evaluated on"),
        *metric_columns,
        TableColumn("Traffic", True),
        TableColumn("Time", True),
    ]


def _format_row(row: Mapping[str, object]) -> list[str]:
    return [_format_value(key, value) for key, value in row.items()]


def _format_value(key: str, value: object) -> str:
    if not isinstance(value, int | float):
        return str(value) if value else UNDEFINED_TEXT
    return (
        format_score(key, value)
        if key in METRIC_LABELS
        else {"traffic": format_bytes, "seconds": format_duration}.get(key, format_integer)(value)
    )


def _add_curves_section(page: HtmlPage, records: Mapping[str, RunRecord], metric: str) -> None:
    sources_by_run = {name: _available_sources(record, metric) for name, record in records.items()}
    sources_by_run = {name: sources for name, sources in sources_by_run.items() if sources}
    if not sources_by_run:
        page.add_section("Curves").add_text(f"The runs have not recorded {metric_label(metric).lower()} by round.")
        return
    shared_source = next(
        (source for source in SCORE_SOURCES if all(source in sources for sources in sources_by_run.values())), None
    )
    series = [
        _source_series(name, records[name], shared_source or sources[0], metric)
        for name, sources in sources_by_run.items()
    ]
    caption = f"{metric_label(metric)} after every round"
    if shared_source:
        caption += f" on {SPLIT_LABELS[shared_source[0]]} data, {SOURCE_LABELS[shared_source[1]]}."
    else:
        source_texts = (
            f"{name}: {SPLIT_LABELS[split]} data, {SOURCE_LABELS[evaluated_at]}"
            for name, [(split, evaluated_at), *_] in sources_by_run.items()
        )
        caption += f". The runs were evaluated differently: {'; '.join(source_texts)}."
    if any(curve.std_over_sites is not None for curve in series):
        caption += f" {BAND_DESCRIPTIONS['68']}"
    figure = plot_curves(series, metric_label(metric), percent=metric in PERCENT_METRICS, wide=True)
    page.add_section("Curves").add_figure(to_svg(figure, "curves"), caption, wide=True)


def _available_sources(record: RunRecord, metric: str) -> list[ScoreSource]:
    """Sources that this run can be plotted by, preferred ones first; those with one round only if nothing else exists."""
    num_rounds_by_source = {
        (split, evaluated_at): len(
            record.site_metric_by_round(split, metric)
            if evaluated_at == "sites"
            else record.metric_by_round(split, evaluated_at, metric)
        )
        for split, evaluated_at in SCORE_SOURCES
    }
    curve_sources = [source for source in SCORE_SOURCES if num_rounds_by_source[source] > 1]
    return curve_sources or [source for source in SCORE_SOURCES if num_rounds_by_source[source]]


def _source_series(name: str, record: RunRecord, source: ScoreSource, metric: str) -> CurveSeries:
    split, evaluated_at = source
    if evaluated_at == "sites":
        return mean_over_sites(name, record.site_metric_by_round(split, metric))
    round_values = record.metric_by_round(split, evaluated_at, metric)
    return CurveSeries(name, [round_number for round_number, _ in round_values], [value for _, value in round_values])


def _add_differences_section(page: HtmlPage, records: Mapping[str, RunRecord]) -> None:
    flat_settings = {name: flatten_settings(record.settings) for name, record in records.items()}
    setting_keys = list(dict.fromkeys(key for settings in flat_settings.values() for key in settings))
    differing_keys = [
        key for key in setting_keys if len({settings.get(key) for settings in flat_settings.values()}) > 1
    ]
    page.add_section("Settings that differ")
    if not differing_keys:
        page.add_text("None: the study files have the same settings.")
        return
    rows = [
        [key, *(settings.get(key, UNDEFINED_TEXT) for settings in flat_settings.values())] for key in differing_keys
    ]
    page.add_table([TableColumn("Setting"), *map(TableColumn, records)], rows)


def flatten_settings(settings: Settings, prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} -> {"a.b": "1"}."""
    flat_settings: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat_settings |= flatten_settings(value, f"{prefix}{key}.")
        else:
            flat_settings[prefix + key] = str(value)
    return flat_settings
