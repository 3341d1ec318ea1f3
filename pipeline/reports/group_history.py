"""Who was in which group in every round, and when they moved."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.reports.record import Record

Members = Mapping[str, str]  # site -> group


@dataclass(frozen=True)
class Move:
    round: int
    site: str
    came_from: str
    went_to: str


@dataclass(frozen=True)
class History:
    """Groups bear the names that they have in the round `at`; those that were not there then are called f1, f2, ..."""

    rounds: Sequence[int]
    groups: Sequence[Members]  # a round each; empty where unknown
    at: int  # the place of the round that the run's result is of

    @property
    def result(self) -> Members:
        return self.groups[self.at]

    @property
    def names(self) -> list[str]:
        """Those of the result first."""
        known = {group for members in self.groups for group in members.values()}
        ours = set(self.result.values())
        return sorted(known, key=lambda name: (name not in ours, natural(name)))

    @property
    def moves(self) -> list[Move]:
        found, last = [], dict[str, str]()
        for turn, members in zip(self.rounds, self.groups, strict=True):
            found += [Move(turn, s, last[s], group) for s, group in members.items() if last.get(s, group) != group]
            last |= members
        return found


def history(record: Record) -> History | None:
    """From the first round with groups on."""
    known = [place for place, line in enumerate(record.rounds) if line.get("groups")]
    if not known:
        return None
    lines = record.rounds[known[0] :]
    rounds = [int(line["round"]) for line in lines]
    groups = [{str(s): str(g) for s, g in (line.get("groups") or {}).items()} for line in lines]
    best = (record.results or {}).get("best_round")
    at = next((place for place, turn in enumerate(rounds) if turn == best and groups[place]), known[-1] - known[0])
    paths = any("." in group for members in groups for group in members.values())
    return History(rounds, followed(groups, at) if paths else groups, at)


def followed(groups: Sequence[Members], at: int) -> list[Members]:
    """Places in a tree are dealt out anew with every tree: a group is followed by its members instead."""
    sets = {name: {site for site, group in groups[at].items() if group == name} for name in groups[at].values()}
    out = [groups[at]]
    for step, places in ((1, range(at + 1, len(groups))), (-1, range(at - 1, -1, -1))):
        seen = {name: set(sites) for name, sites in sets.items()}  # as each group was last met
        for place in places:
            named = _named(groups[place], seen, taken={*sets, *(g for m in out for g in m.values())})
            out = [*out, named] if step > 0 else [named, *out]
            seen |= {name: {site for site, group in named.items() if group == name} for name in named.values()}
    return out


def _named(members: Members, seen: Mapping[str, set[str]], taken: set[str]) -> dict[str, str]:
    """Under the names of the groups met before that they share most sites with."""
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    new, old = sorted(set(members.values()), key=natural), sorted(seen, key=natural)
    sets = [{site for site, group in members.items() if group == name} for name in new]
    if not new:
        return {}
    shared = np.array([[len(sites & seen[name]) for name in old] for sites in sets])
    rows, columns = linear_sum_assignment(-shared)
    names = {new[r]: old[c] for r, c in zip(rows, columns, strict=True) if shared[r, c]}
    free = (name for n in range(1, len(taken) + len(new) + 1) if (name := f"f{n}") not in taken)
    names |= {name: next(free) for name in new if name not in names}
    return {site: names[group] for site, group in members.items()}


def natural(name: str) -> list[tuple[int, int | str]]:
    """0.2 before 0.10."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name) if part]
