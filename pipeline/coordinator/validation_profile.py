"""What an exported model needs to know of images that nobody may send: asked for in sums, once, when a run is over.

Twice: from the first sums come the middle and the spread of the features (the lens) and the temperature; seen through
these, the second ones tell how scores and distances are spread. RUN/profile.safetensors keeps them for `hemofed export`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.coordinator.checkpoint import load_tensors, save_tensors
from pipeline.core.errors import BadRun
from pipeline.core.parameters import Snapshot
from pipeline.protocol.messages import SiteId, Vectors, Wait
from pipeline.protocol.tasks import TEMPERATURES, Lens, Profile, Profiled, lens_from

if TYPE_CHECKING:
    from pipeline.coordinator.round_loop import Coordinator, Progress
    from pipeline.study.schema import Study

FILE = "profile.safetensors"
RIDGE = 1e-3  # of the mean variance: features that hardly vary must not decide what is foreign
Members = Mapping[str, tuple[SiteId, ...]]


@dataclass(frozen=True)
class Portrait:
    """What a bundle knows of the images that a model was chosen by."""

    seen: Profiled  # through the lens, summed over sites
    lens: Lens
    between: Tensor  # (C, 2, FINE_BINS) of the share of [others, class] that scores at least so much: its variance between sites


def write_profile(coordinator: Coordinator, state: Any, progress: Progress, shape: tuple[int, ...]) -> None:
    """Of every model that can be exported; nothing for points, which no bedside machine photographs."""
    study = coordinator.study
    if not study.evaluation.profile or len(shape) != 3:
        return
    found: dict[str, Portrait] = {}
    turns = turns_of(study, shape)
    models = study.strategy.models(state)
    if study.evaluation.where == "coordinator":
        found |= {name: seen for name, model in models.items() if (seen := _here(coordinator, model, progress, turns))}
    else:
        for members in disjoint(members_of(models, study.strategy.groups(state), coordinator.sites)):
            sends = {s: _vectors(models[name], turns) for name, sites in members.items() for s in sites}
            found |= _twice(coordinator, "profile", members, sends, progress)
        if study.strategy.personalised or study.strategy.remembers:
            own = {f"site/{site}": (site,) for site in coordinator.sites if f"site/{site}" not in found}
            sends = {
                site: {**study.strategy.exam(state, site), "turns": torch.tensor(turns)} for (site,) in own.values()
            }
            found |= _twice(coordinator, "profile_own", own, sends, progress)
    if found:
        tensors = {
            f"{name}:{key}": value
            for name, one in found.items()
            for key, value in {**one.seen.sums(), **one.lens.vectors(), "between": one.between}.items()
        }
        save_tensors(coordinator.folder.path / FILE, {"models": list(found), "split": "val"}, tensors)


def read_profile(path: Path, name: str) -> Portrait | None:
    """None where a run has none of this model: it was told not to, or had no validation images."""
    if not (path / FILE).exists():
        return None
    header, tensors = load_tensors(path / FILE)
    if name not in header["models"]:
        return None
    mine = {key.rpartition(":")[2]: value for key, value in tensors.items() if key.rpartition(":")[0] == name}
    try:
        return Portrait(Profiled.of(mine), lens_from(mine), mine["between"])
    except KeyError as error:
        raise BadRun(f"{path / FILE} lacks {error}; it is damaged: run the study anew") from error


def members_of(models: Mapping[str, Snapshot], groups: Mapping[SiteId, str], sites: Sequence[SiteId]) -> Members:
    """Whose images a model is for: a site's own, its group's (and of the groups below it), or everybody's."""
    found: dict[str, tuple[SiteId, ...]] = {}
    for name in models:
        kind, _, which = name.partition("/")
        if kind == "site":
            found[name] = tuple(s for s in sites if s == which)
        elif kind == "group":
            found[name] = tuple(s for s in sites if f"{groups.get(s, '')}.".startswith(f"{which}."))
        else:
            found[name] = tuple(sites)
    return {name: mine for name, mine in found.items() if mine}


def disjoint(members: Members) -> Iterator[Members]:
    """Models that can be asked for at once, because nobody is to look at two of them."""
    left = dict(members)
    while left:
        batch: dict[str, tuple[SiteId, ...]] = {}
        busy: set[SiteId] = set()
        for name, sites in left.items():
            if not busy & set(sites):
                batch[name] = sites
                busy |= set(sites)
        yield batch
        left = {name: sites for name, sites in left.items() if name not in batch}


def lens_of(seen: Profiled) -> Lens:
    """Spread within classes, about each one's middle: a rare class is not foreign for being rare."""
    held = seen.confusion.sum(1).double()  # images of each class
    n = float(held.sum())
    mean = seen.first.sum(0) / n
    middles = torch.where(held[:, None] > 0, seen.first / held.clamp(min=1)[:, None], mean)
    spread = seen.second / n - (middles * (held / n)[:, None]).T @ middles
    scale = float(spread.diagonal().mean())
    values, vectors = torch.linalg.eigh(spread + max(RIDGE * scale, 1e-12) * torch.eye(len(mean), dtype=torch.float64))
    whiten = vectors / values.clamp(min=1e-12).sqrt()
    centres = (middles - mean) @ whiten
    return Lens(mean.float(), whiten.float(), centres.float(), temperature_of(seen.heated))


def temperature_of(heated: Tensor) -> float:
    """Where the loss is least: of a parabola through the best temperature and its neighbours, in their logarithms."""
    best = int(heated.argmin())
    if best in (0, len(heated) - 1):
        return float(TEMPERATURES[best])
    low, middle, high = heated[best - 1 : best + 2].double().tolist()
    bend = low - 2 * middle + high
    shift = 0.5 * (low - high) / bend if bend > 0 else 0.0
    return float(TEMPERATURES[best] * (TEMPERATURES[1] / TEMPERATURES[0]) ** shift)


def turns_of(study: Study, shape: tuple[int, ...]) -> int:
    return study.augment.views if shape[1] == shape[2] else 1


def _vectors(model: Snapshot, turns: int) -> Vectors:
    return {"weights": model.weights, "stats": model.stats, "turns": torch.tensor(turns)}


def _twice(
    coordinator: Coordinator, task: str, members: Members, sends: Mapping[SiteId, Vectors], progress: Progress
) -> dict[str, Portrait]:
    first = _asked(coordinator, task, members, sends, progress)
    lenses = {name: lens_of(_total(parts)) for name, parts in first.items()}
    through = {s: {**sends[s], **lenses[name].vectors()} for name in lenses for s in members[name]}
    second = _asked(coordinator, task, {name: members[name] for name in lenses}, through, progress)
    return {name: Portrait(_total(parts), lenses[name], between(parts)) for name, parts in second.items()}


def _asked(
    coordinator: Coordinator, task: str, members: Members, sends: Mapping[SiteId, Vectors], progress: Progress
) -> dict[str, list[Profiled]]:
    """Each site's sums by model, without models of which nobody has an image."""
    if not sends:
        return {}
    replies = coordinator.asking(task, progress, Wait(quorum=0), ("val",)).each(sends)
    by_site = {reply.site: Profiled.of(reply.update.sum) for reply in replies}
    found = {}
    for name, sites in members.items():
        parts = [by_site[site] for site in sites if site in by_site]
        if any(float(part.n) for part in parts):
            found[name] = parts
    return found


def _total(parts: Sequence[Profiled]) -> Profiled:
    return sum(parts[1:], parts[0])


def between(parts: Sequence[Profiled]) -> Tensor:
    """How much more sites differ than chance alone would make them: the variance between groups of an analysis of variance.

    A slide comes from one place, and rates pooled over all of them say less about it than their counts suggest. One site
    tells nothing of others: 0.
    """
    scores = torch.stack([part.scores for part in parts]).double()  # (S, C, 2, B)
    held = scores.sum(3, keepdim=True)
    reached = scores.flip(3).cumsum(3).flip(3)  # at this bin's lower edge or above it
    total, sites = held.sum(0), (held > 0).sum(0)
    share = reached.sum(0) / total.clamp(min=1)
    apart = (held * (reached / held.clamp(min=1) - share) ** 2).sum(0)
    room = total - (held**2).sum(0) / total.clamp(min=1)
    found = (apart - (sites - 1).clamp(min=0) * share * (1 - share)) / room.clamp(min=1)
    return torch.where(sites > 1, found.clamp(min=0), 0.0).float()


def _here(coordinator: Coordinator, model: Snapshot, progress: Progress, turns: int) -> Portrait | None:
    """On the coordinator's own validation images."""

    def seen(lens: Lens | None) -> Profiled:
        job = Profile(model.weights, "val", model.stats, lens, turns)
        (one,) = coordinator.run_here([job], progress.round)
        assert isinstance(one, Profiled)
        return one

    first = seen(None)
    if not float(first.n):
        return None
    lens = lens_of(first)
    return Portrait(second := seen(lens), lens, between([second]))
