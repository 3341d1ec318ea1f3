"""A finished run -> a signed bundle. No patient's image is looked at: what the model knows of them it has from sums."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from deploy.bundle.bundle import NORMALISED, Manifest, sealed, zipped
from deploy.bundle.ood_guard import Reference, reference_of
from deploy.bundle.operating_points import Calibration, Point, points_of
from deploy.export.corruptions import SPOILED
from deploy.export.model_card import facts, in_words, monai_metadata
from deploy.export.onnx_graph import OPSET, Bedside, answers, check_parity, to_onnx
from deploy.export.quantize import CALIBRATED_ON, Quantised, quantised
from deploy.inference.test_time_augmentation import seen_from_all_sides
from pipeline.coordinator.run_folder import RunFolder
from pipeline.coordinator.validation_profile import Portrait, read_profile, turns_of
from pipeline.core.errors import BadRun, Refused
from pipeline.core.files import full_disk_is_named
from pipeline.protocol.tasks import TEMPERATURES
from pipeline.runs.score_saved_model import load_model
from pipeline.study.schema import Study
from privacy.ledger.keys import public_hex

PARITY_IMAGES = 500
RENDERED = 1200  # cells, made for this: nobody's
SEED = 0xED6E
UNLICENSED = "not stated: ask whoever gave it to you"


@dataclass(frozen=True)
class Exported:
    folder: Path
    zip: Path
    digest: str
    key: str
    card: dict[str, Any]
    calibration: Calibration
    reference: Reference | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Nobodys:
    """Rendered cells in the size that the network takes; labels where it tells apart what the renderer does."""

    images: NDArray[np.uint8]  # (N, H, W, 3)
    labels: NDArray[np.int64] | None


def export(
    folder: RunFolder,
    name: str,
    out: Path,
    key: Ed25519PrivateKey,
    int8: bool = False,
    licence: str = UNLICENSED,
    scale: tuple[float | None, float | None] = (None, None),
    say: Callable[[str], None] = lambda text: None,
) -> Exported:
    """`name`: global, group/2, site/S; `scale`: pixels of a field that one training image shows, and of a red cell there,
    where the data do not tell."""
    window, diameter = _scale(folder.study(), scale)
    zip_path = out.with_name(f"{out.name}.zip")
    for path in (out, zip_path):
        if path.exists():
            raise BadRun(f"{path} exists and is not overwritten; choose another -o, or move it away")
    study = folder.study()
    if study.normalise.name not in NORMALISED:
        raise Refused(
            f"normalise {study.normalise.name!r} comes from a plugin, which bedside machines do not have; train without it"
        )
    kind, _, site = name.partition("/")
    module, header = load_model(folder, f"site/{quote(site, safe='')}" if kind == "site" else name)
    shape, classes = tuple(header["shape"]), tuple(header["classes"])
    if len(shape) != 3:
        raise Refused(f"{name} takes {shape} numbers, and bundles are for images; export a study of images")
    profile = read_profile(folder.path, name)
    lens, warnings = profile.lens if profile else None, [] if profile else [_unprofiled(study, name)]
    positive = study.evaluation.positive
    say("drawing the graph")
    bedside = Bedside(module, shape, lens, study.normalise.model_dump())
    graph = to_onnx(bedside, (shape[1], shape[2]))
    say("comparing it with the network")
    nobodys = rendered((shape[1], shape[2]), classes)
    largest = check_parity(bedside, module, graph, nobodys.images[:PARITY_IMAGES])
    small = None
    if int8:
        say("quantising")
        small = quantised(graph, nobodys.images, nobodys.labels, None if positive is None else classes.index(positive))
        warnings += [f"no int8 model: {small.reason}"] if small.reason else []
    calibration = calibration_of(profile, positive, classes)
    reference = _reference(profile, graph, nobodys, turns_of(study, shape)) if profile else None
    manifest = Manifest(
        name=study.name, model=name, classes=classes, size=(shape[1], shape[2]), resize=study.data.resize,
        turns=8 if turns_of(study, shape) == 8 else 1,
        normalise=study.normalise.model_dump(), window=window, diameter=diameter,
        precisions=("fp32", "int8") if small and small.graph else ("fp32",), opset=OPSET, made=_now(),
        software={package: version(package) for package in ("hemofed", "torch", "onnx", "onnxruntime")},
    )  # fmt: skip
    card = facts(folder, name, header, licence) | {"export": _made(manifest, largest, small)}
    files = {
        "model.onnx": graph,
        "bundle.json": _json(manifest.model_dump(mode="json")),
        "calibration.json": _json(calibration.model_dump(mode="json")),
        "card.json": _json(card),
        "card.md": in_words(card, calibration, reference).encode(),
        "metadata.json": _json(monai_metadata(card, manifest.size)),
    }
    if small and small.graph:
        files["model.int8.onnx"] = small.graph
    if reference:
        files["reference.json"] = _json(reference.model_dump(mode="json"))
    return _written(sealed(files, key), out, zip_path, key, card, calibration, reference, tuple(warnings))


def rendered(size: tuple[int, int], classes: tuple[str, ...]) -> Nobodys:
    from deploy.inference.resize import resized
    from sites.data.renderer.cell_outlines import TYPES
    from sites.data.synthetic_smear import SyntheticSmear

    data = SyntheticSmear(cells=RENDERED, size=72, patients=60, task="types").load(None, SEED)
    order = np.random.default_rng(SEED).permutation(RENDERED)  # calibration and judging see all patients
    images = np.ascontiguousarray(data.x.permute(0, 2, 3, 1).numpy()[order])
    types = data.y.numpy()[order]
    labels = None
    if classes == TYPES:
        labels = types
    elif classes == ("other", "schistocyte"):
        labels = (types == TYPES.index("schistocyte")).astype(np.int64)
    return Nobodys(resized(images, size, "area"), labels)


def calibration_of(profile: Portrait | None, positive: str | None, classes: tuple[str, ...]) -> Calibration:
    if profile is None:
        return Calibration(temperature=1.0, positive=positive, points=(), measured_on="nothing")
    seen, lens = profile.seen, profile.lens
    points, curve = _points(profile, classes.index(positive)) if positive else ((), ())
    n = int(seen.n)
    return Calibration(
        temperature=lens.temperature,
        positive=positive,
        points=points,
        curve=curve,
        measured_on=f"{n:,} validation images of its sites, in sums",
        loss=float(np.interp(np.log(lens.temperature), np.log(TEMPERATURES), seen.heated.numpy())) / n,
        loss_before=float(seen.heated[len(TEMPERATURES) // 2]) / n,
    )


def _points(profile: Portrait, which: int) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    scores, between = profile.seen.scores[which].numpy(), profile.between[which].numpy()
    return points_of(scores.astype(np.int64), between.astype(np.float64))


def _reference(profile: Portrait, graph: bytes, nobodys: Nobodys, turns: int) -> Reference:
    """With the guard's own error rates, on rendered cells spoiled on purpose."""
    seen, lens = profile.seen, profile.lens
    counts = seen.distances.numpy().astype(np.int64), seen.measures.numpy().astype(np.int64)
    reference = reference_of(int(seen.n), lens.centres.numpy().astype(np.float64), *counts)
    catches, run = {}, partial(answers, graph)
    for what, spoil in SPOILED.items():
        _, traits, measures = seen_from_all_sides(run, spoil(nobodys.images[:CALIBRATED_ON]), turns)
        refused = reference.refusals(traits, measures)
        catches[what] = sum(why is not None for why in refused) / len(refused)
    return reference.model_copy(update={"catches": catches})


def _scale(study: Study, given: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
    """What is cut about a cell of a field, in diameters of a red cell, and that diameter in pixels; none: single images."""
    window, diameter = given[0] or study.data.window_pixels, given[1] or study.data.cell_pixels
    if (window is None) != (diameter is None):
        raise Refused("how cells are cut out of fields follows from both --window and --diameter; give both, or none")
    return (None, None) if window is None or diameter is None else (window / diameter, diameter)


def _unprofiled(study: Study, name: str) -> str:
    why = "evaluation.profile is off" if not study.evaluation.profile else f"the run has no profile of {name}"
    return (
        f"{why}, so there are no calibrated probabilities, no operating points and no guard. Run the study (anew) with "
        "evaluation.profile = true and validation images, or measure it on your own: hemofed edge verify"
    )


def _made(manifest: Manifest, largest: float, small: Quantised | None) -> dict[str, Any]:
    told: dict[str, Any] = {"words": "There is no int8 model."}
    if small is not None:
        words = f"The int8 model was left out: {small.reason}." if small.reason else "The int8 model answers alike."
        told = {**small.told, "reason": small.reason, "words": words}
    return {"made": manifest.made, "hemofed": manifest.software["hemofed"], "opset": OPSET,
            "onnxruntime": manifest.software["onnxruntime"], "parity": {"images": PARITY_IMAGES, "largest": largest}, "int8": told}  # fmt: skip


def _written(
    files: dict[str, bytes],
    out: Path,
    zip_path: Path,
    key: Ed25519PrivateKey,
    card: dict[str, Any],
    calibration: Calibration,
    reference: Reference | None,
    warnings: tuple[str, ...],
) -> Exported:
    """Both appear whole or not at all."""
    with full_disk_is_named(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
        try:
            inner = aside / "folder"
            inner.mkdir()
            for name, data in files.items():
                (inner / name).write_bytes(data)
            zipped(files, aside / "zip")
            for path in (*inner.iterdir(), aside / "zip"):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            inner.rename(out)
            (aside / "zip").rename(zip_path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    digest = hashlib.sha256(files["SHA256SUMS"]).hexdigest()
    return Exported(out, zip_path, digest, public_hex(key), card, calibration, reference, warnings)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
