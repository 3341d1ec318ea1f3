"""Tiny runs to audit, and the text of their reports."""

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


def make_tiny_study(**sections: Any) -> Study:
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
        "num_threads": 1,
    }
    return Study.model_validate(raw | sections)


def run_tiny_study(path: Path, **sections: Any) -> RunFolder:
    study = make_tiny_study(**sections)
    folder = RunFolder.create(path, study)
    run_simulation(study, folder)
    return folder


def copy_run_folder(folder: RunFolder, to: Path) -> RunFolder:
    shutil.copytree(folder.path, to)
    return RunFolder.open(to)


def _make_pixel() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (1, 1)).save(buffer, "PNG")
    return buffer.getvalue()


def read_pdf_text(report: Any) -> str:
    """The text of the PDF's paragraphs, in order."""
    texts: list[str] = []

    def collect_texts(part: Any) -> None:
        if isinstance(part, Paragraph):
            texts.append(part.getPlainText())
        elif isinstance(part, list | tuple):
            for inner in part:
                collect_texts(inner)
        else:
            collect_texts([getattr(part, name) for name in ("_content", "_cellvalues") if hasattr(part, name)])

    figures = [block.key for chapter in report.chapters for block in chapter.blocks if isinstance(block, FigureBlock)]
    # one pixel instead of each figure: rendering figures takes longer than everything else
    collect_texts(_build_story(report, dict.fromkeys(figures, _make_pixel())))
    return " ".join(" ".join(texts).split())
