"""Creates a run of a study: its folder, the offer that officers approve, and the database row that the supervisor reads."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from pipeline.core.errors import StudyError
from pipeline.records.run_control import request_state
from pipeline.service.storage.database import RunRow
from pipeline.service.web.context import ServiceContext

MAX_STUDY_NAME_CHARS = 60  # characters of the study's name that a run's ID starts with


def create_run(
    context: ServiceContext, study_toml: str, site_names: Sequence[str] | None, min_sites: int | None, actor: str
) -> RunRow:
    """Writes the files first and the row last, so that a run in the database always has all its files.

    `site_names`: None for all enrolled sites. `min_sites`: None for the study's `round.quorum`.
    """
    from pipeline.coordinator.run_folder import RunFolder
    from pipeline.study.offer import create_offer
    from pipeline.study.toml_file import parse_study

    study = parse_study(study_toml, "the study", {})
    context.check_study(study)
    key_by_site = _select_sites(context, site_names)
    num_required = max(1, study.round.quorum) if min_sites is None else min_sites
    if not 1 <= num_required <= len(key_by_site):
        raise StudyError(
            f"the run has {len(key_by_site)} sites but needs the approval of at least {num_required}; set min_sites or "
            "round.quorum between 1 and the number of sites"
        )
    run_id = f"{study.name[:MAX_STUDY_NAME_CHARS]}-{secrets.token_hex(3)}"
    run_offer = create_offer(run_id, study, key_by_site, context.public_key)
    folder = RunFolder.create(context.home.runs_folder / run_id, study)
    folder.write_offer(run_offer)
    request_state(folder.path, "run")
    return context.store.add_run(
        run_id,
        name=study.name,
        strategy=study.strategy.name,
        rounds=study.rounds,
        digest=run_offer.digest,
        min_sites=num_required,
        sites=key_by_site,
        actor=actor,
    )


def apply_run_action(context: ServiceContext, run_id: str, action: str, actor: str) -> RunRow:
    def pass_on(row: RunRow) -> None:
        """To the run's process, which reads it between rounds."""
        request_state(context.home.runs_folder / row.id, row.desired_state)

    return context.store.apply_action(run_id, action, actor, on_change=pass_on)


def _select_sites(context: ServiceContext, site_names: Sequence[str] | None) -> dict[str, str]:
    key_by_site = {site.name: site.key for site in context.store.list_sites() if site.left is None}
    if site_names is None:
        if not key_by_site:
            raise StudyError("no site is enrolled; invite one with `hemofed coordinator invite SITE`")
        return key_by_site
    if not site_names or len(set(site_names)) != len(site_names):
        raise StudyError("name at least one site, and every site once; without `sites` all enrolled sites take part")
    if unknown := [name for name in site_names if name not in key_by_site]:
        raise StudyError(f"not enrolled: {', '.join(unknown)}; enrolled sites: {', '.join(key_by_site) or 'none'}")
    return {name: key_by_site[name] for name in site_names}
