"""`hemofed demo slide`: renders a synthetic patient's slide, to try `hemofed predict` without real blood."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from pipeline.cli.output import console, print_json
from pipeline.core.errors import DataError, StudyError
from pipeline.core.files import raise_no_space, write_atomically
from pipeline.core.registry import suggest_names
from sites.data.renderer.cell_outlines import CELL_TYPES
from sites.data.renderer.field import RenderedField, render_field
from sites.data.renderer.patients import SCHISTOCYTE, sample_patient

CELLS_PER_FIELD = 60


def demo_slide_command(
    out: Path, num_cells: int, schistocyte_fraction: float, seed: int, scanner: str | None, dicom: bool, json: bool
) -> None:
    if out.exists() and any(out.iterdir()):
        raise DataError(f"{out} is not empty; choose another folder")
    num_schistocytes = round(num_cells * schistocyte_fraction)
    fields = render_slide(num_cells, num_schistocytes, seed)
    if scanner is not None:
        fields = _apply_scanner(fields, scanner, seed)
    out.mkdir(parents=True, exist_ok=True)
    for n, field in enumerate(fields, start=1):
        path = out / f"field-{n:02d}.{'dcm' if dicom else 'png'}"
        with raise_no_space(path):
            if dicom:
                from deploy.slide.dicom_demo import save_microscopy

                save_microscopy(field.image, path, n, seed)
            else:
                Image.fromarray(field.image).save(path)
    write_atomically(out / "truth.csv", _truth_csv(fields).encode())
    if json:
        print_json({"folder": str(out), "fields": len(fields), "cells": num_cells, "schistocytes": num_schistocytes})
        return
    console.print(
        f"wrote {out}: {len(fields)} fields of one synthetic patient, {num_cells:,} red cells, {num_schistocytes} of them schistocytes",
        soft_wrap=True,
    )


def render_slide(num_cells: int, num_schistocytes: int, seed: int) -> list[RenderedField]:
    """Fields of one patient with one stain; the schistocytes are spread over all fields."""
    rng = np.random.default_rng([seed, 0x51DE])
    patient = sample_patient(rng)
    type_mix = patient.type_mix.copy()
    type_mix[SCHISTOCYTE] = 0
    cell_types = np.concatenate(
        [
            np.full(num_schistocytes, SCHISTOCYTE),
            rng.choice(len(CELL_TYPES), num_cells - num_schistocytes, p=type_mix / type_mix.sum()),
        ]
    )
    rng.shuffle(cell_types)
    types_by_field = np.array_split(cell_types, -(-num_cells // CELLS_PER_FIELD))
    return [render_field(rng, patient, field_types, num_unlabeled=0) for field_types in types_by_field]


def _apply_scanner(fields: list[RenderedField], scanner: str, seed: int) -> list[RenderedField]:
    """Needs torch, from the extra `train`."""
    from sites.population.scanner_profiles import SCANNER_PROFILES

    if scanner not in SCANNER_PROFILES:
        raise StudyError(f"--scanner {scanner}: {suggest_names(scanner, SCANNER_PROFILES)}")
    import torch

    from sites.population.scanner_transforms import apply_scanner_profile

    images = torch.from_numpy(np.stack([field.image for field in fields])).permute(0, 3, 1, 2)
    scanned = (
        apply_scanner_profile(images, SCANNER_PROFILES[scanner], lambda row: seed * 1000 + row)
        .permute(0, 2, 3, 1)
        .numpy()
    )
    return [replace(field, image=np.ascontiguousarray(image)) for field, image in zip(fields, scanned, strict=True)]


def _truth_csv(fields: list[RenderedField]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["field", "x", "y", "type"])
    for n, field in enumerate(fields, start=1):
        writer.writerows(
            [n, int(x), int(y), CELL_TYPES[cell_type]]
            for (x, y), cell_type in zip(field.points, field.types, strict=True)
        )
    return buffer.getvalue()
