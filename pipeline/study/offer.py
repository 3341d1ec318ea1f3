"""What a coordinator proposes to its sites: a study, who else is in it, and who asks. A site's officer approves its digest."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from pipeline.core.errors import BadMessage

if TYPE_CHECKING:
    from pipeline.study.schema import Study

# names become file names and certificates' common names: no separators, no dots in front
SITE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,47}$"
RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"
SiteName = Annotated[str, StringConstraints(pattern=SITE_NAME)]
RunName = Annotated[str, StringConstraints(pattern=RUN_NAME)]
Hex32 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Offer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: RunName
    study: str = Field(max_length=200_000)  # TOML, with every default written out and without paths
    plan: Hex32  # the study's hash, which covers the version of hemofed and of plugins
    sites: dict[SiteName, Hex32]  # public keys of the agents, in the order that the strategy knows them
    coordinator: Hex32  # its public key
    version: str = Field(max_length=40)

    @property
    def digest(self) -> str:
        """The order of the sites counts: a study may give each its own epsilon."""
        fields = self.model_dump() | {"sites": list(self.sites.items())}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def read_study(self) -> Study:
        """As this machine's version understands it."""
        from pipeline.study.toml_file import read_study

        return read_study(self.study, f"the study of {self.run}", {})


def offer(run: str, study: Study, sites: dict[str, str], coordinator: str) -> Offer:
    from pipeline.study.toml_file import to_toml

    plan = study.dump()
    plan["data"].pop("path", None)  # where data lie is each site's own affair
    plan["public"].get("data", {}).pop("path", None)
    return Offer(
        run=run, study=to_toml(plan), plan=study.hash, sites=sites, coordinator=coordinator, version=version("hemofed")
    )


def statement(made: Offer, site: str, once: str) -> dict[str, str]:
    """What a site signs to show that it is the one the offer names; `once`: the coordinator's number used once."""
    return {"offer": made.digest, "site": site, "once": once}


def read_offer(text: str | bytes) -> Offer:
    try:
        return Offer.model_validate_json(text)
    except ValidationError as error:
        raise BadMessage(
            f"this is no offer of a study ({error.error_count()} fields are wrong); is it of the same version?"
        ) from error
