"""The data of one real site, as a population of its own."""

from __future__ import annotations

from dataclasses import replace

import torch

from pipeline.core.errors import BadData
from pipeline.core.registry import choices
from pipeline.protocol.messages import SiteId
from pipeline.study.schema import Public, Sites, Study
from sites.governance.settings import Settings
from sites.population.simulated_sites import COORDINATOR, Population, populate
from sites.training.base import Examples


def own_population(study: Study, settings: Settings, site: SiteId, device: torch.device) -> Population:
    """All that lies in the site's folder; in a rehearsal (`settings.plays`) one simulated site's part of the study's data."""
    data = study.data.model_copy(
        update={k: v for k, v in settings.layout.items() if k in type(study.data).model_fields}
    )
    study = study.model_copy(update={"data": data, "public": _public(study)})
    if settings.plays is not None:
        people = populate(study, settings.data, device)
        if settings.plays not in people.sites:
            raise BadData(
                f"site.toml says that this agent plays {settings.plays!r}, but the study's sites are "
                f"{', '.join(people.sites[:10])}; correct `plays`, or give the site data of its own"
            )
        return _alone(people, settings.plays, site)
    if settings.data is not None:
        study = study.model_copy(update={"data": data.model_copy(update={"path": settings.data})})
    whole, plain = choices("partitions")["iid"], choices("skews")["none"]
    study = study.model_copy(
        update={"sites": Sites(count=1), "partition": whole(name="iid"), "skew": plain(name="none")}
    )
    people = populate(study, settings.data, device)
    return _alone(people, people.sites[0], site)


def _public(study: Study) -> Public:
    """Public examples are the coordinator's; a protected site takes the weights of classes from them."""
    needed = study.privacy.at_site is not None and study.local.balance != "none"
    return study.public if needed else Public()


def _alone(people: Population, was: SiteId, site: SiteId) -> Population:
    nothing = torch.zeros(0, dtype=torch.int64, device=people.pool.device)
    examples = {site: people.examples[was], COORDINATOR: Examples(people.public, nothing, nothing)}
    acquisitions = {site: people.acquisitions[was]} if was in people.acquisitions else {}
    return replace(people, sites=(site,), examples=examples, acquisitions=acquisitions)
