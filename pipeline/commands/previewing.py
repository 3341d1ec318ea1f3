"""`hemofed site preview`."""

from __future__ import annotations

from pathlib import Path

from pipeline.commands.output import console, print_json, table
from pipeline.study import load_study
from pipeline.study_file import find_study, parse_override

SHOWN = 20


def preview_command(name: str, sets: list[str], data: Path | None, out: Path, json: bool) -> None:
    import torch

    from pipeline.reports.preview import look_at, write_preview
    from sites.build import populate

    study = load_study(find_study(name), dict(map(parse_override, sets)))
    people = populate(study, data, torch.device("cpu"))
    seen = look_at(people)
    page = write_preview(study, people, seen, out / "preview.html" if out.is_dir() else out)
    if json:
        sites = {site: one.json(people.classes) for site, one in seen.items()}
        about = {"study": study.name, "classes": people.classes, "shape": people.shape, "skipped": people.skipped}
        print_json({**about, "sites": sites, "page": str(page)})
        return
    rows = [
        [site, one.acquisition or "–", str(sum(one.counts["train"])), " ".join(f"{mean:.2f}" for mean in one.means)]
        for site, one in list(seen.items())[:SHOWN]
    ]
    console.print(table(["site", "acquisition", "train", "means"], rows, words=2))
    if len(seen) > SHOWN:
        console.print(f"… {len(seen) - SHOWN} more on the page")
    console.print(f"wrote {page}: it shows training examples; nothing of it was sent anywhere", soft_wrap=True)
