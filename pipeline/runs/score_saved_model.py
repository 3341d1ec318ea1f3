"""A saved model on other data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from models.networks.base import Model
from pipeline.coordinator.checkpoint import load_tensors
from pipeline.core.registry import choices, near
from pipeline.core.errors import BadData, BadRun, BadStudy
from pipeline.coordinator.metrics import Focus, details, metrics
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.parameters import Snapshot, Spec
from sites.data.base import SPLITS, Dataset, Source
from sites.training.base import Pool
from sites.training.evaluation import evaluate


def load_model(folder: RunFolder, name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    path = folder.path / "models" / f"{name}.safetensors"
    known = sorted(
        str(p.relative_to(folder.path / "models").with_suffix(""))
        for p in (folder.path / "models").rglob("*.safetensors")
    )
    if name not in known:
        raise BadRun(
            f"{folder.path} has no model {name!r}; "
            + (near(name, known) if known else "it is not finished, or keeps its models at the sites")
        )
    header, tensors = load_tensors(path)
    table = dict(header["model"])
    if table.get("name") not in choices("models"):
        raise BadRun(f"{path}: model {table.get('name')!r} is not known here; is a plugin missing?")
    model = choices("models")[table["name"]].model_validate(table)
    assert isinstance(model, Model)
    module = model.make(tuple(header["shape"]), len(header["classes"]), 0)
    Spec.of(module).write(module, Snapshot(tensors["weights"], tensors["stats"]))
    return module.eval(), header


def score_saved(
    folder: RunFolder, path: Path | None, source: str | None, name: str, split: str, sets: Mapping[str, Any]
) -> dict[str, Any]:
    study = folder.study()
    module, header = load_model(folder, name)
    data = _source(study.data, source, path, header, sets, split == "all").load(path, study.seed)
    if data.shape != tuple(header["shape"]):
        raise BadData(
            f"{path or 'data'}: examples of shape {data.shape}, but the model takes {tuple(header['shape'])}; set data.size"
        )
    if list(data.classes) != list(header["classes"]):
        raise BadData(
            f"{path or 'data'}: classes {', '.join(data.classes)}, but the model knows {', '.join(header['classes'])}"
        )
    index = _rows(data, split)
    own = path is None and source is None and not sets
    measured = data.where("train") if own else torch.arange(len(data.y))  # of a new place, all there is
    normal = study.normalise.apply(data.x, measured)
    x = data.x if normal is None else normal
    seen = evaluate(module, Pool(x, data.y, torch.device("cpu")), index, len(data.classes))
    positive = study.evaluation.positive
    focus = Focus(data.classes.index(positive) if positive else None, study.evaluation.specificity)
    where = {
        "model": name,
        "data": str(path or study.data.name),
        "split": split,
        "classes": list(data.classes),
        "fingerprint": data.fingerprint,
        "normalised": study.normalise.name,
        "skewed": False,
    }
    return {**metrics(seen, focus), **details(seen, focus), **where, "skipped": list(data.skipped)}


def _rows(data: Dataset, split: str) -> torch.Tensor:
    if split == "all":
        return torch.arange(len(data.y))
    if split not in SPLITS:
        raise BadStudy(f"--split {split}: {near(split, ('all', *SPLITS))}")
    return data.where(split)


def _source(
    own: Source, kind: str | None, path: Path | None, header: Mapping[str, Any], sets: Mapping[str, Any], whole: bool
) -> Source:
    """The study's own kind of source moved to `path`, or another kind fitted to the model's input."""
    if kind is not None and kind not in choices("data"):
        raise BadStudy(f"--source {kind}: {near(kind, choices('data'))}")
    cls = choices("data")[kind or own.name]
    given: dict[str, Any] = own.model_dump(exclude_none=True) if cls is type(own) else {"name": kind}
    if "size" in cls.model_fields and len(header["shape"]) == 3:
        if header["shape"][-1] == header["shape"][-2]:  # others have to come in the right size
            given["size"] = header["shape"][-1]
        fitting = {"channels": header["shape"][0], "classes": tuple(header["classes"])}
        given |= {key: value for key, value in fitting.items() if key in cls.model_fields}
    if whole:  # nothing to set apart
        given |= {key: 0.0 for key in ("val", "test") if key in cls.model_fields}
    given |= ({"path": path} if path else {}) | {key.removeprefix("data."): value for key, value in sets.items()}
    try:
        source = cls.model_validate(given)
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise BadStudy(f"the data cannot be read like this: {told}") from error
    assert isinstance(source, Source)
    return source
