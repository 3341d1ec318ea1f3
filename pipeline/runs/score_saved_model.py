"""Scores a saved model on other data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from models.networks.base import ModelConfig
from pipeline.coordinator.metrics import PositiveClass, compute_metrics, compute_plot_data
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import DataError, RunFolderError, StudyError
from pipeline.core.parameters import ModelState, ParameterSpec
from pipeline.core.registry import registered_components, suggest_names
from pipeline.core.tensor_io import load_tensors
from pipeline.records.base import FrozenRecord
from pipeline.records.scores import ModelMetrics
from sites.data.base import SPLITS, Dataset, DataSource
from sites.data.pool import ExamplePool
from sites.training.evaluation import evaluate


class SavedModelScores(FrozenRecord):
    metrics: ModelMetrics
    model: str
    data: str
    split: str
    classes: tuple[str, ...]
    fingerprint: str
    normalized: str
    skewed: bool
    skipped: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The metrics and what they are of, on one level."""
        fields = super().to_dict()
        return {**fields.pop("metrics"), **fields}


def list_models(folder: RunFolder) -> list[str]:
    """Names of the saved models: global, cluster/NAME, site/NAME."""
    models = folder.path / "models"
    return sorted(str(p.relative_to(models).with_suffix("")) for p in models.rglob("*.safetensors"))


def load_model(folder: RunFolder, model_name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    path = folder.path / "models" / f"{model_name}.safetensors"
    model_names = list_models(folder)
    if model_name not in model_names:
        raise RunFolderError(
            f"{folder.path} has no model {model_name!r}; "
            + (
                suggest_names(model_name, model_names)
                if model_names
                else "it is not finished, or its models stay at the sites"
            )
        )
    header, tensors = load_tensors(path)
    model_table = dict(header["model"])
    if model_table.get("name") not in registered_components("models"):
        raise RunFolderError(f"{path}: model {model_table.get('name')!r} is unknown here; is a plugin missing?")
    model = registered_components("models")[model_table["name"]].model_validate(model_table)
    assert isinstance(model, ModelConfig)
    module = model.init_network(tuple(header["shape"]), len(header["classes"]), 0)
    ParameterSpec.from_module(module).write_state(module, ModelState(tensors["weights"], tensors["stats"]))
    return module.eval(), header


def score_saved_model(
    folder: RunFolder,
    data_path: Path | None,
    source_name: str | None,
    model_name: str,
    split: str | None,
    overrides: Mapping[str, Any],
) -> SavedModelScores:
    """`split` None: all examples of other data, the test examples of the run's."""
    study = folder.load_study()
    module, header = load_model(folder, model_name)
    split = split or ("all" if data_path else "test")
    data = _build_source(study.data, source_name, data_path, header, overrides, split == "all").load(
        data_path, study.seed
    )
    if data.shape != tuple(header["shape"]):
        raise DataError(
            f"{data_path or 'data'}: examples of shape {data.shape}, but the model needs {tuple(header['shape'])}; set data.size"
        )
    if list(data.classes) != list(header["classes"]):
        raise DataError(
            f"{data_path or 'data'}: classes {', '.join(data.classes)}, but the model has {', '.join(header['classes'])}"
        )
    rows = _select_rows(data, split)
    is_run_data = data_path is None and source_name is None and not overrides
    # color normalization is fitted to the training split of the run's data, to all images of other data
    reference_rows = data.rows_in_split("train") if is_run_data else torch.arange(len(data.y))
    normalized = study.normalization.apply(data.x, reference_rows)
    x = data.x if normalized is None else normalized
    sums = evaluate(module, ExamplePool(x, data.y, torch.device("cpu")), rows, len(data.classes))
    class_name = study.evaluation.positive_class
    positive_class = PositiveClass(
        data.classes.index(class_name) if class_name else None, study.evaluation.target_specificity
    )
    metrics = compute_metrics(sums, positive_class)
    return SavedModelScores(
        metrics=metrics.model_copy(update=compute_plot_data(sums, positive_class)),
        model=model_name,
        data=str(data_path or study.data.name),
        split=split,
        classes=data.classes,
        fingerprint=data.fingerprint,
        normalized=study.normalization.name,
        skewed=False,
        skipped=data.skipped,
    )


def _select_rows(data: Dataset, split: str) -> torch.Tensor:
    if split == "all":
        return torch.arange(len(data.y))
    if split not in SPLITS:
        raise StudyError(f"--split {split}: {suggest_names(split, ('all', *SPLITS))}")
    return data.rows_in_split(split)


def _build_source(
    run_source: DataSource,
    source_name: str | None,
    data_path: Path | None,
    header: Mapping[str, Any],
    overrides: Mapping[str, Any],
    use_all_examples: bool,
) -> DataSource:
    """The study's data source at `data_path`, or another source that is fitted to the model's input."""
    if source_name is not None and source_name not in registered_components("data"):
        raise StudyError(f"--source {source_name}: {suggest_names(source_name, registered_components('data'))}")
    cls = registered_components("data")[source_name or run_source.name]
    settings: dict[str, Any] = (
        run_source.model_dump(exclude_none=True) if cls is type(run_source) else {"name": source_name}
    )
    if "size" in cls.model_fields and len(header["shape"]) == 3:
        if header["shape"][-1] == header["shape"][-2]:  # non-square images must already have the right size
            settings["size"] = header["shape"][-1]
        model_settings = {"channels": header["shape"][0], "classes": tuple(header["classes"])}
        settings |= {key: value for key, value in model_settings.items() if key in cls.model_fields}
    if use_all_examples:  # no split is held out
        settings |= {key: 0.0 for key in ("val", "test") if key in cls.model_fields}
    settings |= ({"path": data_path} if data_path else {}) | {
        key.removeprefix("data."): value for key, value in overrides.items()
    }
    try:
        source = cls.model_validate(settings)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise StudyError(f"invalid settings of the data source: {problems}") from error
    assert isinstance(source, DataSource)
    return source
