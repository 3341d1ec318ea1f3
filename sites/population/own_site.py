"""The data of one real site, as a federated dataset with a single site."""

from __future__ import annotations

from dataclasses import replace

import torch

from pipeline.core.errors import DataError
from pipeline.core.registry import registered_components
from pipeline.protocol.messages import SiteId
from pipeline.study.schema import PublicDataConfig, SitesConfig, Study
from sites.data.pool import SplitIndices
from sites.governance.settings import SiteSettings
from sites.population.simulated_sites import COORDINATOR, FederatedDataset, load_federated_data


def load_own_data(study: Study, settings: SiteSettings, site: SiteId, device: torch.device) -> FederatedDataset:
    """All examples in the site's data folder; with `settings.simulated_site`, that site's part of the study's data.

    The study's partition and feature skew are simulations and do not apply to the data of a real site.
    """
    data = study.data.model_copy(
        update={k: v for k, v in settings.layout.items() if k in type(study.data).model_fields}
    )
    study = study.model_copy(update={"data": data, "public": _public_data_config(study)})
    if settings.simulated_site is not None:
        dataset = load_federated_data(study, settings.data, device)
        if settings.simulated_site not in dataset.sites:
            raise DataError(
                f"site.toml makes this agent simulate {settings.simulated_site!r}, but the study's sites are "
                f"{', '.join(dataset.sites[:10])}; correct `simulated_site`, or give the site its own data"
            )
        return _restrict_to_site(dataset, settings.simulated_site, site)
    if settings.data is not None:
        study = study.model_copy(update={"data": data.model_copy(update={"path": settings.data})})
    iid_partition = registered_components("partitions")["iid"]
    no_feature_skew = registered_components("feature_skews")["none"]
    study = study.model_copy(
        update={
            "sites": SitesConfig(count=1),
            "partition": iid_partition(name="iid"),
            "feature_skew": no_feature_skew(name="none"),
        }
    )
    dataset = load_federated_data(study, settings.data, device)
    return _restrict_to_site(dataset, dataset.sites[0], site)


def _public_data_config(study: Study) -> PublicDataConfig:
    """Public examples are the coordinator's; a site with DP-SGD needs them for its class weights only."""
    needs_public_data = study.privacy.dp_sgd is not None and study.local.class_balance != "none"
    return study.public if needs_public_data else PublicDataConfig()


def _restrict_to_site(dataset: FederatedDataset, source_site: SiteId, site: SiteId) -> FederatedDataset:
    """The part of `source_site` and of the coordinator, with `source_site` renamed to `site`."""
    no_indices = torch.zeros(0, dtype=torch.int64, device=dataset.pool.device)
    split_indices = {
        site: dataset.split_indices[source_site],
        COORDINATOR: SplitIndices(dataset.public_indices, no_indices, no_indices),
    }
    acquisition_descriptions = (
        {site: dataset.acquisition_descriptions[source_site]} if source_site in dataset.acquisition_descriptions else {}
    )
    return replace(
        dataset, sites=(site,), split_indices=split_indices, acquisition_descriptions=acquisition_descriptions
    )
