"""The offer of a run: the study, the sites' public keys and the coordinator's. A site's officer approves its digest."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from pipeline.core.errors import MessageError

if TYPE_CHECKING:
    from pipeline.study.schema import Study

OFFER_FILE = "offer.json"  # in a run folder
# names become file names and certificates' common names: no separators, no leading dot
SITE_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,47}$"
RUN_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"
SiteName = Annotated[str, StringConstraints(pattern=SITE_NAME_PATTERN)]
RunName = Annotated[str, StringConstraints(pattern=RUN_NAME_PATTERN)]
HexDigest32 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class StudyOffer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: RunName
    study_toml: str = Field(max_length=200_000)  # TOML, with every default written out and without paths
    study_hash: HexDigest32  # the study's hash, which covers the version of hemofed and of plugins
    site_keys: dict[SiteName, HexDigest32]  # public keys of the site agents, in the strategy's order of sites
    coordinator_key: HexDigest32  # public
    version: str = Field(max_length=40)

    @property
    def digest(self) -> str:
        """Depends on the order of the sites, because a study may give each its own epsilon."""
        content = self.model_dump() | {"sites": list(self.site_keys.items())}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def read_study(self) -> Study:
        """Parses the study with this machine's version of hemofed."""
        from pipeline.study.toml_file import parse_study

        return parse_study(self.study_toml, f"the study of {self.run}", {})


def create_offer(run: str, study: Study, site_keys: dict[str, str], coordinator_key: str) -> StudyOffer:
    from pipeline.study.toml_file import to_toml

    study_dict = study.to_dict()
    study_dict["data"].pop("path", None)  # each site has its own data path
    study_dict["public"].get("data", {}).pop("path", None)
    return StudyOffer(
        run=run,
        study_toml=to_toml(study_dict),
        study_hash=study.hash,
        site_keys=site_keys,
        coordinator_key=coordinator_key,
        version=version("hemofed"),
    )


def possession_statement(offer: StudyOffer, site: str, nonce: str) -> dict[str, str]:
    """What a site signs to prove that it holds the key in the offer. `nonce`: the coordinator's number used once."""
    return {"offer": offer.digest, "site": site, "once": nonce}


def read_offer(text: str | bytes) -> StudyOffer:
    try:
        return StudyOffer.model_validate_json(text)
    except ValidationError as error:
        raise MessageError(
            f"this is not a study offer that version {version('hemofed')} can read ({error.error_count()} fields are wrong); "
            "use the same version on both sides"
        ) from error
