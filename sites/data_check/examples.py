"""A site's examples with the names under which a person knows them, read as a study would, or as well as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch

from pipeline.core.errors import BadData, HemofedError
from pipeline.study.schema import Study
from sites.data.base import SPLITS, Dataset, Source
from sites.data.folder import Folder, _scan
from sites.data.images import SUFFIXES, decode_all
from sites.data.manifest import Entry, read_manifest
from sites.data_check.file_survey import Survey
from sites.data_check.findings import Tick, silent
from sites.governance.settings import Settings

LOOK = 96  # pixels a side at which images of several sizes, or large ones, are looked at
LARGE = 256
NO_FOLDER = "(no folder)"
NO_SPLIT = len(SPLITS)
AT_ONCE = 512  # files


@dataclass(frozen=True)
class Holding:
    data: Dataset
    names: tuple[str, ...]  # a file's path from the folder, else its row
    loose: bool = False  # nobody said what they are: classes are folders, and there are no splits

    def rows(self, rows: np.ndarray, split: np.ndarray | None = None) -> Holding:
        index = torch.from_numpy(rows)
        data, chosen = self.data, self.data.split[index] if split is None else torch.from_numpy(split)
        keys = {name: replace(key, codes=key.codes[index]) for name, key in data.keys.items()}
        data = replace(data, x=data.x[index], y=data.y[index], split=chosen, keys=keys)
        return replace(self, data=data, names=tuple(self.names[row] for row in rows.tolist()))

    @property
    def is_images(self) -> bool:
        return self.data.x.dtype == torch.uint8 and self.data.x.ndim == 4

    @property
    def unit(self) -> np.ndarray:
        """(N,) int64; -1: not known whose it is"""
        if self.data.unit is None:
            return np.full(len(self.data.y), -1)
        return self.data.keys[self.data.unit].codes.numpy()


def source_at(source: Source, settings: Settings) -> Source:
    """The study's source, told where this site's files lie and how."""
    own: dict[str, Any] = {key: value for key, value in settings.layout.items() if key in type(source).model_fields}
    if settings.data is not None and settings.plays is None:
        own["path"] = settings.data
    return type(source).model_validate(source.model_dump() | own)


def hold(
    source: Source, study: Study | None, settings: Settings, found: Survey | None, tick: Tick = silent
) -> tuple[Holding | None, str]:
    """What there is to look at, and what a study would say instead of reading it, if so."""
    refused, seed = "", 0 if study is None else study.seed
    for attempt in _attempts(source, study, found):
        try:
            tick("reading images", 0, 0)
            data = attempt.load(settings.data, seed)
            held = Holding(data, _names(attempt, settings, data))
            return (held if study is None or settings.plays is None else played(held, study, settings.plays)), refused
        except (HemofedError, OSError) as error:
            refused = refused or (f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error))
    return (None if found is None else _loose(found, tick)), refused


def _attempts(source: Source, study: Study | None, found: Survey | None) -> list[Source]:
    """First as a study would. Where none asks for a size, images of several sizes are not the site's fault."""
    if not isinstance(source, Folder):
        return [source]
    lenient = source.model_copy(update={"corrupt": "skip"})
    small = lenient.model_copy(update={"size": LOOK})
    sizes = {} if found is None else found.sizes
    if source.size is not None:
        return [lenient]
    if study is None:
        return [small if len(sizes) > 1 or any(max(size) > LARGE for size in sizes) else lenient, small]
    return [lenient, small]


def _names(source: Source, settings: Settings, data: Dataset) -> tuple[str, ...]:
    folder = source.path or settings.data
    if isinstance(source, Folder) and folder is not None:
        entries: Sequence[Entry]
        if source.manifest:
            entries = read_manifest(folder, source.manifest, source.patient, source.classes)[0]
        else:
            entries = _scan(folder, source.classes)
        return tuple(_read([entry.shown for entry in entries], data.skipped))
    field = data.keys.get("field")
    if field is None:
        return tuple(f"row {row}" for row in range(len(data.y)))
    return tuple(f"row {row} ({field.names[code]})" for row, code in enumerate(field.codes.tolist()))


def _read(shown: Sequence[str], skipped: Sequence[str]) -> list[str]:
    """`skipped` has its reasons in the order of the files."""
    left = [*reversed(skipped)]
    names = []
    for name in shown:
        if left and left[-1].startswith(f"{name}: "):
            left.pop()
        else:
            names.append(name)
    return names


def _loose(found: Survey, tick: Tick) -> Holding | None:
    paths = [seen.path for seen in found.of("image") if seen.suffix in SUFFIXES]
    base = found.root if found.root.is_dir() else found.root.parent
    images: list[np.ndarray] = []
    names: list[str] = []
    skipped: list[str] = []
    for first in range(0, len(paths), AT_ONCE):
        part = paths[first : first + AT_ONCE]
        for path, image in zip(part, decode_all([base / path for path in part], 3, LOOK), strict=True):
            if isinstance(image, str):
                skipped.append(f"{path}: {image}")
            else:
                images.append(image)
                names.append(path)
        tick("reading images", first + len(part), len(paths))
    if not images:
        return None
    labels = [str(PurePosixPath(name).parent) if "/" in name else NO_FOLDER for name in names]
    classes, y = np.unique(np.array(labels), return_inverse=True)
    data = Dataset(
        torch.from_numpy(np.stack(images)), torch.from_numpy(y.astype(np.int64)), tuple(map(str, classes)),
        torch.full((len(y),), NO_SPLIT, dtype=torch.uint8), "", skipped=tuple(skipped),
    )  # fmt: skip
    return Holding(data, tuple(names), loose=True)


def played(held: Holding, study: Study, plays: str) -> Holding:
    """In a rehearsal: the part of one simulated site, before any skew."""
    shards = study.partition.assign(held.data, study.sites.count, study.seed)
    mine = next((shard for shard in shards if shard.name == plays), None)
    if mine is None:
        raise BadData(
            f"site.toml says that this agent plays {plays!r}, but the study's sites are "
            f"{', '.join(shard.name for shard in shards[:10])}; correct `plays`"
        )
    parts = {split: getattr(mine, split).numpy() for split in SPLITS}
    rows, first = np.unique(np.concatenate([*parts.values()]), return_index=True)
    split = np.repeat(np.arange(len(SPLITS), dtype=np.uint8), [len(part) for part in parts.values()])
    return held.rows(rows, split[first])
