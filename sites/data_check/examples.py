"""A site's examples with the names of their files, read as a study would read them if that is possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch

from pipeline.core.errors import DataError, HemofedError
from pipeline.study.schema import Study
from sites.data.base import SPLITS, Dataset, DataSource
from sites.data.folder import ImageFolder, scan_class_folders
from sites.data.images import IMAGE_SUFFIXES, decode_images
from sites.data.manifest import ManifestEntry, read_manifest
from sites.data_check.file_survey import FileSurvey
from sites.data_check.findings import ProgressCallback, ignore_progress
from sites.governance.settings import SiteSettings

CHECK_IMAGE_PIXELS = 96  # side to which large images, and images of several sizes, are resized
MAX_FULL_IMAGE_PIXELS = 256  # side up to which images of one size are not resized
NO_FOLDER_CLASS = "(no folder)"
UNASSIGNED_SPLIT = len(SPLITS)
FILES_PER_BATCH = 512


@dataclass(frozen=True)
class NamedExamples:
    dataset: Dataset
    names: tuple[str, ...]  # the file's path relative to the folder, or the row number
    is_fallback: bool = False  # a study could not read them: classes are folder names, there are no splits

    def select_rows(self, rows: np.ndarray, split: np.ndarray | None = None) -> NamedExamples:
        index = torch.from_numpy(rows)
        dataset = self.dataset
        new_split = dataset.split[index] if split is None else torch.from_numpy(split)
        keys = {name: replace(key, codes=key.codes[index]) for name, key in dataset.keys.items()}
        dataset = replace(dataset, x=dataset.x[index], y=dataset.y[index], split=new_split, keys=keys)
        return replace(self, dataset=dataset, names=tuple(self.names[row] for row in rows.tolist()))

    @property
    def has_images(self) -> bool:
        return self.dataset.x.dtype == torch.uint8 and self.dataset.x.ndim == 4

    @property
    def unit_codes(self) -> np.ndarray:
        """(N,) int64: privacy unit of each example, -1 if unknown"""
        if self.dataset.privacy_unit is None:
            return np.full(len(self.dataset.y), -1)
        return self.dataset.keys[self.dataset.privacy_unit].codes.numpy()


def resolve_source(source: DataSource, settings: SiteSettings) -> DataSource:
    """The study's source with the path and the layout of this site's files."""
    overrides: dict[str, Any] = {
        key: value for key, value in settings.layout.items() if key in type(source).model_fields
    }
    if settings.data is not None and settings.simulated_site is None:
        overrides["path"] = settings.data
    return type(source).model_validate(source.model_dump() | overrides)


def load_examples(
    source: DataSource,
    study: Study | None,
    settings: SiteSettings,
    survey: FileSurvey | None,
    on_progress: ProgressCallback = ignore_progress,
) -> tuple[NamedExamples | None, str]:
    """The examples, and the error with which a study would refuse them ("" if it would not)."""
    seed = 0 if study is None else study.seed
    read_error = ""
    for candidate in _candidate_sources(source, study, survey):
        try:
            on_progress("reading images", 0, 0)
            dataset = candidate.load(settings.data, seed)
            examples = NamedExamples(dataset, _example_names(candidate, settings, dataset))
            return (
                examples
                if study is None or settings.simulated_site is None
                else select_simulated_site(examples, study, settings.simulated_site)
            ), read_error
        except (HemofedError, OSError) as error:
            read_error = read_error or (
                f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
            )
    return (None if survey is None else _load_without_study(survey, on_progress)), read_error


def _candidate_sources(source: DataSource, study: Study | None, survey: FileSurvey | None) -> list[DataSource]:
    """To be tried in order: as a study would read them, then resized. Without a study, several sizes are no error."""
    if not isinstance(source, ImageFolder):
        return [source]
    skipping = source.model_copy(update={"corrupt": "skip"})
    resized = skipping.model_copy(update={"size": CHECK_IMAGE_PIXELS})
    sizes = {} if survey is None else survey.image_sizes
    if source.size is not None:
        return [skipping]
    if study is None:
        return [
            resized if len(sizes) > 1 or any(max(size) > MAX_FULL_IMAGE_PIXELS for size in sizes) else skipping,
            resized,
        ]
    return [skipping, resized]


def _example_names(source: DataSource, settings: SiteSettings, dataset: Dataset) -> tuple[str, ...]:
    folder = source.path or settings.data
    if isinstance(source, ImageFolder) and folder is not None:
        entries: Sequence[ManifestEntry]
        if source.manifest:
            entries = read_manifest(folder, source.manifest, source.patient, source.classes)[0]
        else:
            entries = scan_class_folders(folder, source.classes)
        return tuple(_drop_skipped_names([entry.display_name for entry in entries], dataset.skipped))
    field_key = dataset.keys.get("field")
    if field_key is None:
        return tuple(f"row {row}" for row in range(len(dataset.y)))
    return tuple(f"row {row} ({field_key.names[code]})" for row, code in enumerate(field_key.codes.tolist()))


def _drop_skipped_names(all_names: Sequence[str], skipped: Sequence[str]) -> list[str]:
    """`skipped` is a list of `name: reason`, in the order of `all_names`."""
    remaining_skipped = [*reversed(skipped)]
    names = []
    for name in all_names:
        if remaining_skipped and remaining_skipped[-1].startswith(f"{name}: "):
            remaining_skipped.pop()
        else:
            names.append(name)
    return names


def _load_without_study(survey: FileSurvey, on_progress: ProgressCallback) -> NamedExamples | None:
    """All images of the folder, for a check of their pixels although a study could not read them."""
    paths = [file.path for file in survey.files_of_kind("image") if file.suffix in IMAGE_SUFFIXES]
    folder = survey.root if survey.root.is_dir() else survey.root.parent
    images: list[np.ndarray] = []
    names: list[str] = []
    skipped: list[str] = []
    for start in range(0, len(paths), FILES_PER_BATCH):
        batch = paths[start : start + FILES_PER_BATCH]
        decoded = decode_images([folder / path for path in batch], 3, CHECK_IMAGE_PIXELS)
        for path, image in zip(batch, decoded, strict=True):
            if isinstance(image, str):
                skipped.append(f"{path}: {image}")
            else:
                images.append(image)
                names.append(path)
        on_progress("reading images", start + len(batch), len(paths))
    if not images:
        return None
    labels = [str(PurePosixPath(name).parent) if "/" in name else NO_FOLDER_CLASS for name in names]
    classes, y = np.unique(np.array(labels), return_inverse=True)
    dataset = Dataset(
        torch.from_numpy(np.stack(images)),
        torch.from_numpy(y.astype(np.int64)),
        tuple(map(str, classes)),
        torch.full((len(y),), UNASSIGNED_SPLIT, dtype=torch.uint8),
        "",
        skipped=tuple(skipped),
    )
    return NamedExamples(dataset, tuple(names), is_fallback=True)


def select_simulated_site(examples: NamedExamples, study: Study, simulated_site: str) -> NamedExamples:
    """The partition of one simulated site of the study, before any feature skew."""
    partitions = study.partition.assign(examples.dataset, study.sites.count, study.seed)
    own_partition = next((partition for partition in partitions if partition.name == simulated_site), None)
    if own_partition is None:
        raise DataError(
            f"site.toml makes this agent simulate {simulated_site!r}, but the study's sites are "
            f"{', '.join(partition.name for partition in partitions[:10])}; correct `simulated_site`"
        )
    rows_by_split = {split: getattr(own_partition, split).numpy() for split in SPLITS}
    rows, first_index = np.unique(np.concatenate([*rows_by_split.values()]), return_index=True)
    split = np.repeat(
        np.arange(len(SPLITS), dtype=np.uint8), [len(split_rows) for split_rows in rows_by_split.values()]
    )
    return examples.select_rows(rows, split[first_index])
