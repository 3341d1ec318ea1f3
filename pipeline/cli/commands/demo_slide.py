"""`hemofed demo slide`: a made-up patient's slide, for trying the bedside without anybody's blood."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from pipeline.cli.output import console, print_json
from pipeline.core.errors import BadData, BadStudy
from pipeline.core.files import full_disk_is_named, write_atomically
from pipeline.core.registry import near
from sites.data.renderer.cell_outlines import TYPES
from sites.data.renderer.field import Field, render_field
from sites.data.renderer.patients import SCHISTOCYTE, draw_patient

A_FIELD = 60  # cells


def slide_command(
    out: Path, cells: int, schistocytes: float, seed: int, scanner: str | None, dicom: bool, json: bool
) -> None:
    if out.exists() and any(out.iterdir()):
        raise BadData(f"{out} is not empty; choose another folder")
    broken = round(cells * schistocytes)
    fields = rendered_slide(cells, broken, seed)
    if scanner is not None:
        fields = _scanned(fields, scanner, seed)
    out.mkdir(parents=True, exist_ok=True)
    for n, field in enumerate(fields, start=1):
        path = out / f"field-{n:02d}.{'dcm' if dicom else 'png'}"
        with full_disk_is_named(path):
            if dicom:
                from deploy.slide.dicom_demo import save_microscopy

                save_microscopy(field.image, path, n, seed)
            else:
                Image.fromarray(field.image).save(path)
    write_atomically(out / "truth.csv", _truth(fields).encode())
    if json:
        print_json({"folder": str(out), "fields": len(fields), "cells": cells, "schistocytes": broken})
        return
    console.print(f"wrote {out}: {len(fields)} fields of one made-up patient, {cells:,} red cells, {broken} of them schistocytes", soft_wrap=True)  # fmt: skip


def rendered_slide(cells: int, broken: int, seed: int) -> list[Field]:
    """One patient, one stain; schistocytes strewn over all fields."""
    rng = np.random.default_rng([seed, 0x51DE])
    patient = draw_patient(rng)
    mix = patient.mix.copy()
    mix[SCHISTOCYTE] = 0
    kinds = np.concatenate([np.full(broken, SCHISTOCYTE), rng.choice(len(TYPES), cells - broken, p=mix / mix.sum())])
    rng.shuffle(kinds)
    parts = np.array_split(kinds, -(-cells // A_FIELD))
    return [render_field(rng, patient, part, others=0) for part in parts]


def _scanned(fields: list[Field], scanner: str, seed: int) -> list[Field]:
    """Needs what studies need: the extra `train`."""
    from sites.population.scanner_profiles import PROFILES

    if scanner not in PROFILES:
        raise BadStudy(f"--scanner {scanner}: {near(scanner, PROFILES)}")
    import torch

    from sites.population.scanner_transforms import see

    x = torch.from_numpy(np.stack([field.image for field in fields])).permute(0, 3, 1, 2)
    seen = see(x, PROFILES[scanner], lambda row: seed * 1000 + row).permute(0, 2, 3, 1).numpy()
    return [replace(field, image=np.ascontiguousarray(image)) for field, image in zip(fields, seen, strict=True)]


def _truth(fields: list[Field]) -> str:
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["field", "x", "y", "type"])
    for n, field in enumerate(fields, start=1):
        rows.writerows([n, int(x), int(y), TYPES[kind]] for (x, y), kind in zip(field.points, field.types, strict=True))
    return out.getvalue()
