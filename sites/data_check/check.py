"""All checks of `hemofed site check` on a site's data, before any study. Nothing is trained, changed or sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.core.errors import MissingDataError
from pipeline.study.schema import Study
from sites.data.base import DataSource
from sites.data_check import class_counts, duplicates, file_findings, image_quality, phi
from sites.data_check.class_counts import ClassCounts
from sites.data_check.duplicates import DuplicateImages, ExampleOrigin
from sites.data_check.examples import NamedExamples, load_examples
from sites.data_check.file_survey import survey_files
from sites.data_check.findings import (
    Finding,
    ProgressCallback,
    Severity,
    format_count,
    ignore_progress,
    sort_by_severity,
    worst_severity,
)
from sites.data_check.image_quality import OutlierGroup, measure_images
from sites.data_check.phi import PhiSummary
from sites.data_check.redaction import Redactor
from sites.governance.settings import SiteSettings

RetainedMaskFn = Callable[[Sequence[str]], list[bool]]


@dataclass(frozen=True)
class DataCheck:
    """Names are redacted, except in `examples`, which has the pixels for a page that stays at the site."""

    data_path: str  # "" if the data are not on disk
    findings: tuple[Finding, ...]
    example_names: tuple[str, ...]
    skipped: tuple[str, ...]  # files left out, each with its reason
    file_counts: dict[str, int]
    class_counts: ClassCounts | None
    phi_summary: PhiSummary | None
    outliers: tuple[OutlierGroup, ...] = ()
    duplicates: DuplicateImages | None = None
    leaking_pairs: tuple[tuple[int, int], ...] = ()  # near duplicates in two splits, or of two units
    examples: NamedExamples | None = field(default=None, repr=False)

    @property
    def severity(self) -> Severity:
        return worst_severity(self.findings)

    def to_dict(self) -> dict[str, Any]:
        duplicates_dict = (
            None
            if self.duplicates is None or self.examples is None
            else self.duplicates.to_dict(self.example_names, example_origin(self.examples))
        )
        return {
            "verdict": self.severity,
            "data": self.data_path,
            "findings": [finding.to_dict() for finding in self.findings],
            "files": self.file_counts,
            "skipped": self.skipped,
            "classes": [] if self.class_counts is None else self.class_counts.classes,
            **({} if self.class_counts is None else self.class_counts.to_dict()),
            "odd": [group.to_dict(self.example_names) for group in self.outliers],
            "copies": duplicates_dict,
            "identity": None if self.phi_summary is None else self.phi_summary.to_dict(),
        }


def check_data(
    source: DataSource,
    study: Study | None,
    settings: SiteSettings,
    retained_mask: RetainedMaskFn | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> DataCheck:
    """`retained_mask`: for a list of privacy units, True for each that did not withdraw; None: no withdrawals."""
    data_path = source.path or settings.data
    if data_path is not None and not data_path.exists():
        raise MissingDataError(f"{data_path} does not exist; correct `data` in site.toml, or the option --data")
    survey = None if data_path is None else survey_files(data_path, on_progress)
    redactor = Redactor() if survey is None else phi.build_redactor(survey)
    examples, read_error = load_examples(source, study, settings, survey, on_progress)
    findings = [*file_findings.reading_findings(source, examples, read_error, redactor, survey)]
    if survey is not None:
        findings += [
            *file_findings.survey_findings(survey, examples, redactor, source),
            *phi.phi_findings(survey, redactor),
        ]
    file_counts = {} if survey is None else file_findings.count_files(survey)
    phi_summary = None if survey is None else phi.summarize_phi(survey)
    redacted_path = "" if data_path is None else redactor.redact_path(str(data_path))
    if examples is None:
        return DataCheck(
            data_path=redacted_path,
            findings=sort_by_severity(findings),
            example_names=(),
            skipped=(),
            file_counts=file_counts,
            class_counts=None,
            phi_summary=phi_summary,
        )
    examples, withdrawn_findings = _drop_withdrawn(examples, retained_mask)
    names = tuple(map(redactor.redact_path, examples.names))
    skipped = tuple(map(redactor.redact_text, examples.dataset.skipped))
    counts = class_counts.count_classes(examples.dataset)
    counts = ClassCounts(tuple(map(redactor.redact_path, counts.classes)), counts.counts, counts.unit, counts.num_units)
    findings += [*withdrawn_findings, *class_counts.class_count_findings(counts)]
    if not examples.has_images or not len(examples.names):
        return DataCheck(
            data_path=redacted_path,
            findings=sort_by_severity(findings),
            example_names=names,
            skipped=skipped,
            file_counts=file_counts,
            class_counts=counts,
            phi_summary=phi_summary,
            examples=examples,
        )
    measures = measure_images(examples.dataset.x.numpy(), on_progress)
    outliers = image_quality.find_outliers(measures)
    blank_rows = [group.rows for group in outliers if group.kind in ("blank", "black")]
    duplicate_images = duplicates.find_duplicates(
        measures, np.concatenate([np.zeros(0, np.int64), *blank_rows]), on_progress
    )
    findings += image_quality.quality_findings(outliers, measures, names.__getitem__)
    findings += duplicates.duplicate_findings(duplicate_images, example_origin(examples), names.__getitem__)
    leaking_pairs = tuple(
        (int(a), int(b)) for a, b in duplicates.find_leaking_pairs(duplicate_images, example_origin(examples))
    )
    return DataCheck(
        data_path=redacted_path,
        findings=sort_by_severity(findings),
        example_names=names,
        skipped=skipped,
        file_counts=file_counts,
        class_counts=counts,
        phi_summary=phi_summary,
        outliers=tuple(outliers),
        duplicates=duplicate_images,
        leaking_pairs=leaking_pairs,
        examples=examples,
    )


def example_origin(examples: NamedExamples) -> ExampleOrigin:
    return ExampleOrigin(examples.dataset.y.numpy(), examples.dataset.split.numpy(), examples.unit_codes)


def _drop_withdrawn(
    examples: NamedExamples, retained_mask: RetainedMaskFn | None
) -> tuple[NamedExamples, list[Finding]]:
    if retained_mask is None or examples.dataset.privacy_unit is None:
        return examples, []
    unit_key = examples.dataset.keys[examples.dataset.privacy_unit]
    is_retained = np.array(retained_mask(unit_key.names), bool)[unit_key.codes.numpy()]
    if is_retained.all():
        return examples, []
    finding = Finding(
        "fine",
        "counts",
        f"{format_count(int((~is_retained).sum()), 'example was', 'examples were')} excluded from this check, because the "
        f"{examples.dataset.privacy_unit} withdrew",
    )
    return examples.select_rows(np.flatnonzero(is_retained)), [finding]
