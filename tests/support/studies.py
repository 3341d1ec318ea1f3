"""Small studies, and what their runs leave in the run folder."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.tensor_io import load_tensors
from pipeline.study.schema import Study


def moons_study(**sections: Any) -> Study:
    """Two moons, four sites, six rounds; `sections` replace those of the study file."""
    raw: dict[str, Any] = {
        "name": "test",
        "rounds": 6,
        "seed": 3,
        "data": {"name": "moons", "points": 200, "val": 0.2},
        "sites": {"count": 4},
        "model": "moons_net",
        "local": {"lr": 0.1, "batch_size": 8, "epochs": 1},
        "evaluation": {"evaluate_at": "sites"},
    }
    return Study.model_validate(raw | sections)


def final_weights(folder: RunFolder) -> torch.Tensor:
    """(P,) of the run's global model."""
    return load_tensors(folder.path / "models" / "global.safetensors")[1]["weights"]
