"""A study becomes a run: its folder, the offer that officers approve, and the row that the supervisor looks at."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from pipeline.core.errors import BadStudy
from pipeline.core.files import write_atomically
from pipeline.service.storage.database import Run
from pipeline.service.web.context import Parts

LONGEST = 60  # of a study's name in a run's


def launch(parts: Parts, text: str, wanted: Sequence[str] | None, fewest: int | None, by: str) -> Run:
    """The row comes last: a run that is there is there with all its files."""
    from pipeline.coordinator.run_folder import RunFolder
    from pipeline.study.offer import offer
    from pipeline.study.toml_file import read_study

    study = read_study(text, "the study", {})
    parts.check(study)
    keys = _chosen(parts, wanted)
    least = max(1, study.waiting.quorum) if fewest is None else fewest
    if not 1 <= least <= len(keys):
        raise BadStudy(
            f"the run is for {len(keys)} sites and asks for the approval of at least {least}; set `fewest` or "
            "waiting.quorum between 1 and the number of sites"
        )
    run = f"{study.name[:LONGEST]}-{secrets.token_hex(3)}"
    proposed = offer(run, study, keys, parts.public)
    folder = RunFolder.create(parts.home.runs / run, study)
    write_atomically(folder.path / "offer.json", proposed.model_dump_json(indent=1).encode())
    write_control(parts, run, "run")
    return parts.store.add_run(run, name=study.name, strategy=study.strategy.name, rounds=study.rounds,
                               digest=proposed.digest, fewest=least, sites=keys, by=by)  # fmt: skip


def write_control(parts: Parts, run: str, want: str) -> None:
    """What the run's process reads between rounds."""
    write_atomically(parts.home.runs / run / "control.json", json.dumps({"want": want}).encode())


def act(parts: Parts, run: str, action: str, by: str) -> Run:
    return parts.store.act(run, action, by, tell=lambda row: write_control(parts, row.id, row.want))


def _chosen(parts: Parts, wanted: Sequence[str] | None) -> dict[str, str]:
    enrolled = {site.name: site.key for site in parts.store.sites() if site.left is None}
    if wanted is None:
        if not enrolled:
            raise BadStudy("no site is enrolled; invite one with `hemofed coordinator invite SITE`")
        return enrolled
    if not wanted or len(set(wanted)) != len(wanted):
        raise BadStudy("name every site once, and at least one; without `sites` all that are enrolled take part")
    if unknown := [name for name in wanted if name not in enrolled]:
        raise BadStudy(f"not enrolled: {', '.join(unknown)}; enrolled are {', '.join(enrolled) or 'none'}")
    return {name: enrolled[name] for name in wanted}


def plain_words(study: dict[str, Any]) -> list[str]:
    """What a study does, for who does not read TOML. `study`: the resolved file."""
    data, model, local = study.get("data", {}), study.get("model", {}), study.get("local", {})
    privacy, share = study.get("privacy", {}), study.get("selection", {}).get("fraction", 1.0)
    much = (
        f"{local['steps']} steps"
        if "steps" in local
        else ("1 epoch" if local.get("epochs", 1) == 1 else f"{local['epochs']} epochs")
    )
    asked = "every site" if share == 1.0 else f"{share:.0%} of the sites"
    lines = [
        study.get("about", ""),
        f"Sites train a {model.get('name')} network on {data.get('name')} data; no image leaves a site.",
        f"{study.get('strategy', {}).get('name')}, {study.get('rounds')} rounds: each asks {asked} for {much} of training.",
        "The coordinator sees only sums over sites." if privacy.get("secure_sum") else "",
        "" if privacy else "No privacy budget is set: updates are not noised.",
    ]
    return [line for line in lines if line]
