"""Tiny runs to be audited."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
from reportlab.platypus import Paragraph

from pipeline.coordinator.run_folder import RunFolder
from pipeline.reports.document.blocks import FigureBlock
from pipeline.reports.document.pdf import _build_story
from pipeline.runs.simulation import run_simulation
from pipeline.study.schema import Study


def tiny(**sections: Any) -> Study:
    raw: dict[str, Any] = {
        "name": "tiny",
        "rounds": 2,
        "seed": 1,
        "data": {"name": "synthetic_smear", "cells": 96, "patients": 24, "size": 24},
        "sites": {"count": 3},
        "model": {"name": "mlp", "hidden": [4]},
        "local": {"lr": 0.1, "batch_size": 10, "epochs": 1},
        "evaluation": {"evaluate_at": "sites"},
        "trainer": "sequential",
        "threads": 1,
    }
    return Study.model_validate(raw | sections)


def ran(path: Path, **sections: Any) -> RunFolder:
    study = tiny(**sections)
    folder = RunFolder.create(path, study)
    run_simulation(study, folder)
    return folder


def copied(folder: RunFolder, to: Path) -> RunFolder:
    shutil.copytree(folder.path, to)
    return RunFolder.open(to)


def _dot() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (1, 1)).save(buffer, "PNG")
    return buffer.getvalue()


def printed(report: Any) -> str:
    """What the PDF's paragraphs say, in order."""
    found: list[str] = []

    def walk(part: Any) -> None:
        if isinstance(part, Paragraph):
            found.append(part.getPlainText())
        elif isinstance(part, list | tuple):
            for one in part:
                walk(one)
        else:
            walk([getattr(part, name) for name in ("_content", "_cellvalues") if hasattr(part, name)])

    drawn = [block.key for chapter in report.chapters for block in chapter.blocks if isinstance(block, FigureBlock)]
    walk(_build_story(report, dict.fromkeys(drawn, _dot())))  # drawing takes longer than all the rest
    return " ".join(" ".join(found).split())
