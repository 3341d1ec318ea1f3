"""A lab's own measurement of a bundle: how good it is there, and the temperature and thresholds that suit it.

Kept beside the bundle and not in it, for the bundle is signed: LABS/DIGEST-PRECISION.json.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from platformdirs import user_data_path
from pydantic import BaseModel, ConfigDict, ValidationError

from deploy.bundle.bundle import Bundle, Precision
from deploy.bundle.ood_guard import Reference
from deploy.bundle.operating_points import SAFE, Calibration, binned, log_odds, points_of, tempered
from deploy.imaging.images import expand, read_path
from deploy.inference.metrics import area, balanced
from deploy.inference.resize import Images, resized
from deploy.inference.runtime import Answers, Runtime
from deploy.slide.reader import cutting, shows_field
from models.probe.feature_names import MEASURES
from pipeline.core.errors import BadBundle, BadData, MissingData
from pipeline.core.files import write_atomically

FEWEST = {True: 20, False: 500}  # labelled cells that a threshold may be set by: of the class that matters, of others
WORST = 0.7  # AUROC below which a lab's thresholds would help nobody
BINS = 4096
TEMPERATURES = np.exp2(np.linspace(-3, 3, 97))


class Lab(BaseModel):
    """What replaces a bundle's own figures on this machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bundle: str  # digest
    precision: Precision  # with which it was measured
    made: str
    calibration: Calibration
    reference: Reference | None
    colours: list[list[int]] | None = None  # (3, 256): this lab's normalisation, where the study has one by site
    unfit: str | None = None  # why it must not be used here: the figures are the bundle's own, and decide nothing


@dataclass(frozen=True)
class Labelled:
    images: Images  # (N, H, W, 3) as the network takes them
    labels: NDArray[np.int64]
    skipped: tuple[str, ...]


def folder_of_labs() -> Path:
    named = os.environ.get("HEMOFED_LABS")
    return Path(named) if named else user_data_path("hemofed") / "labs"


def lab_for(bundle: Bundle, precision: Precision | None = None) -> Lab | None:
    """What was measured here with this bundle and this precision (fp32 if not said)."""
    path = _file(bundle.digest, precision or "fp32")
    try:
        found = Lab.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise BadBundle(f"{path} is damaged; remove it and run `hemofed edge verify` again") from error
    if (found.bundle, found.precision) != (bundle.digest, precision or "fp32"):
        raise BadBundle(f"{path} belongs to another bundle or precision; remove it and run `hemofed edge verify` again")
    return found


def keep(lab: Lab) -> Path:
    return write_atomically(_file(lab.bundle, lab.precision), (lab.model_dump_json(indent=1) + "\n").encode())


def _file(digest: str, precision: Precision) -> Path:
    return folder_of_labs() / f"{digest}-{precision}.json"


def read_labelled(path: Path, bundle: Bundle, say: Callable[[int, int], None] = lambda done, all_: None) -> Labelled:
    """A folder a class, named as the bundle's classes; or a CSV file with the columns path and label.

    The same image counts once; the same image with two labels is refused.
    """
    listed = _listed(path) if path.is_file() else _foldered(path, bundle.manifest.classes)
    classes, images, labels, skipped = bundle.manifest.classes, [], [], []
    seen: dict[bytes, tuple[Path, str]] = {}
    for n, (file, label) in enumerate(listed):
        say(n, len(listed))
        if label not in classes:
            raise BadData(f"{path}: {label!r} is no class of {bundle.manifest.name}; it knows {', '.join(classes)}")
        try:
            (picture,) = read_path(file)
        except (BadData, ValueError) as error:
            skipped.append(str(error) if isinstance(error, BadData) else f"{file}: several frames; one cell a file")
            continue
        if shows_field(bundle, picture):
            skipped.append(f"{file}: a whole field; cut single cells out of it ({cutting(bundle)})")
            continue
        first, said = seen.setdefault(hashlib.sha256(picture.pixels.tobytes()).digest(), (file, label))
        if said != label:
            raise BadData(f"{first} and {file} are the same image, once {said} and once {label}; decide which it is")
        if first is not file:
            skipped.append(f"{file}: the same image as {first}")
            continue
        images.append(resized(picture.pixels[None], bundle.manifest.size, bundle.manifest.resize)[0])
        labels.append(classes.index(label))
    if not images:
        raise MissingData(
            f"{path} holds no labelled images; put single cells into folders named {', '.join(classes)}, or list them in a CSV "
            "file with the columns path and label"
        )
    return Labelled(np.stack(images), np.array(labels, np.int64), tuple(skipped))


def measure(runtime: Runtime, data: Labelled) -> tuple[dict[str, Any], Lab | str]:
    """Figures of the bundle as it came, and what this lab should use instead, or why it should not."""
    bundle, positive = runtime.bundle, runtime.positive
    answers = runtime.answer(data.images)
    told = _figures(answers, data.labels, runtime)
    if positive is None:
        return told, "the study names no class that matters, so there are no thresholds to set"
    own = data.labels == positive
    if told["auroc"] is not None and min(own.sum(), (~own).sum()) >= FEWEST[True] and told["auroc"] < WORST:
        why = f"an AUROC of {told['auroc']:.2f} on {len(own):,} labelled cells of this lab is too low for any threshold to help"
        return told, Lab(bundle=bundle.digest, precision=runtime.precision, made=_now(), calibration=bundle.calibration,
                         reference=bundle.reference, unfit=why)  # fmt: skip
    if own.sum() < FEWEST[True] or (~own).sum() < FEWEST[False]:
        name = bundle.calibration.positive
        return (
            told,
            f"too few labelled cells to set thresholds by (at least {FEWEST[True]} of {name} and {FEWEST[False]} others)",
        )
    temperature, before, after = _temperature(answers.probabilities, data.labels, bundle.calibration.temperature)
    p = tempered(answers.probabilities, bundle.calibration.temperature / temperature)
    points, curve = points_of(binned(log_odds(p, positive), own, BINS))
    if not points[0].tp:
        return (
            told,
            f"at a specificity of {SAFE} nothing is found in this lab's cells: thresholds from them would help nobody",
        )
    calibration = Calibration(
        temperature=temperature, positive=bundle.calibration.positive, points=points, curve=curve,
        measured_on=f"{len(own):,} labelled cells of this lab", loss=after, loss_before=before,
    )  # fmt: skip
    reference = bundle.reference and _widened(bundle.reference, answers)
    return told, Lab(bundle=bundle.digest, precision=runtime.precision, made=_now(), calibration=calibration,
                     reference=reference, colours=_colours(bundle, data.images))  # fmt: skip


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _figures(answers: Answers, y: NDArray[np.int64], runtime: Runtime) -> dict[str, Any]:
    p, positive, point = answers.probabilities, runtime.positive, runtime.calibration.point()
    counts = np.bincount(y, minlength=len(runtime.classes))
    refused = np.array([why is not None for why in answers.refused])
    told: dict[str, Any] = {
        "cells": len(y),
        "by_class": dict(zip(runtime.classes, counts.tolist(), strict=True)),
        "refused": float(refused.mean()),
        "drift": runtime.bundle.reference.drift(answers.traits) if runtime.bundle.reference else None,
        "accuracy": float((p.argmax(1) == y).mean()),
        "balanced_accuracy": balanced(p, y),
        "auroc": area(p, y, positive) if positive is not None and 0 < counts[positive] < len(y) else None,
    }
    if positive is not None and point is not None:
        flags, own = runtime.flagged(p, point), y == positive
        told |= {"sensitivity": float(flags[own].mean()) if own.any() else None,
                 "specificity": float((~flags[~own]).mean()) if (~own).any() else None,
                 "promised": {"sensitivity": point.sensitivity, "specificity": point.specificity}}  # fmt: skip
    return told


def _temperature(p: NDArray[np.float32], y: NDArray[np.int64], now: float) -> tuple[float, float, float]:
    """The best temperature, and the mean loss at the present and at this one."""

    def loss(temperature: float) -> float:
        chosen = tempered(p, now / temperature)[np.arange(len(y)), y]
        return float(-np.log(np.maximum(chosen, 1e-30)).mean())

    best = min(TEMPERATURES, key=loss)
    return float(best), loss(now), loss(best)


def _widened(old: Reference, answers: Answers) -> Reference:
    """What was measured here is not foreign here: limits give way to this lab's own cells, but not to a few odd files."""
    limits = {}
    for column, name in enumerate(MEASURES):
        low, high = np.quantile(answers.measures[:, column], [0.01, 0.99])
        limits[name] = (min(old.limits[name][0], float(low)), max(old.limits[name][1], float(high)))
    far = float(np.quantile(old.distances(answers.traits), 0.99))
    middle = answers.traits.mean(0, dtype=np.float64)
    return old.model_copy(
        update={"limits": limits, "distance": max(old.distance, far), "middle": tuple(middle.tolist())}
    )


def _colours(bundle: Bundle, images: Images) -> list[list[int]] | None:
    if bundle.manifest.normalise["name"] in ("none", "image"):
        return None
    from sites.data.color_tables import table_of

    found: list[list[int]] = table_of(bundle.manifest.normalise, images).tolist()
    return found


def _listed(path: Path) -> list[tuple[Path, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadData(f"{path} is no CSV file in UTF-8 ({error}); save it as such") from error
    if not rows or not {"path", "label"} <= rows[0].keys():
        raise BadData(f"{path} needs the columns path and label in its first line")
    for n, row in enumerate(rows, start=2):
        if not row["path"] or not row["label"]:
            raise BadData(f"{path}, line {n}: no path or no label; fill it in, or remove the line")
    return [(path.parent / row["path"], str(row["label"])) for row in rows]


def _foldered(path: Path, classes: Sequence[str]) -> list[tuple[Path, str]]:
    if not path.is_dir():
        raise MissingData(f"{path} does not exist; name a folder with labelled cells")
    if strangers := sorted(p.name for p in path.iterdir() if p.is_dir() and p.name not in classes):
        raise BadData(f"{path}: {', '.join(strangers[:3])} is no class; folders have to be named {', '.join(classes)}")
    return [(file, name) for name in classes if (path / name).is_dir() for file in expand([path / name])]
