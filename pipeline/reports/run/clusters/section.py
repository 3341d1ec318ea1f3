"""The section of a run's report about groups: who is in which, who moved when, and the tree that they were cut from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pipeline.reports.document.formatting import SPLITS, count_of, joined, score, whole
from pipeline.reports.document.page import Cell, Column, Sheet
from pipeline.reports.run.clusters import figures as group_figures
from pipeline.reports.run.headline_metric import Lens
from pipeline.reports.run.record import Json, Record, number, site_values, view

MOST_NAMES = 12  # of a group's sites in its row
FEW_NAMES = 5  # in a sentence
MOST_LEAVES = 60
TITLES = {"cfl": "Cuts: the first is furthest right"}  # else a distance


def groups(sheet: Sheet, record: Record, lens: Lens) -> None:
    found = history(record)
    if found is None or not found.result:
        return
    sheet.page.section("Groups").text(_summary(found, len(record.sites)), *filter(None, [_later(found)]))
    _table(sheet, record, lens, found)
    ours = set(found.result.values())
    colours = group_figures.colours_of(found.names, ours)
    former = [name for name in found.names if name not in ours]
    sites = _ordered(found, record.sites)
    drawn = group_figures.membership(sites, found.rounds, found.groups, colours, found.at)
    sheet.draw("groups", drawn, _caption(found, former, len(sites)))
    if max(Counter(found.result.values()).values()) > MOST_NAMES:
        _every_site(sheet, found)
    _tree(sheet, record, found, colours)


def _summary(found: History, sites: int) -> str:
    count = len(set(found.result.values()))
    unknown = f", {sites - len(found.result)} not yet in any" if sites > len(found.result) else ""
    words = f"{count_of(len(found.result), 'site')} in {count_of(count, 'group')}{unknown}. "
    moves = found.moves
    if not moves:
        return f"{words}Nobody ever changed group, from round {found.rounds[0]} to {found.rounds[-1]}."
    last = moves[-1].round
    who = _some(sorted({move.site for move in moves if move.round == last}, key=natural))
    since = found.rounds[-1] - last
    if not since:
        return f"{words}The groups had not settled: {who} moved in the last round, {last}."
    return f"{words}The last to move: {who}, in round {last}. Since then, for {count_of(since, 'round')}, the groups have been stable."


def _later(found: History) -> str:
    """Where the result is of an earlier round than the last."""
    end = next(members for members in reversed(found.groups) if members)
    turn = found.rounds[found.at]
    if end is found.result or turn == found.rounds[-1]:
        return ""
    elsewhere = sorted((site for site, group in end.items() if found.result.get(site) != group), key=natural)
    words = f"These are the groups of round {turn}, whose models were kept."
    return f"{words} By the last round, {_some(elsewhere)} had gone elsewhere." if elsewhere else words


def _some(sites: Sequence[str]) -> str:
    if len(sites) <= FEW_NAMES + 1:
        return joined(sites)
    return f"{', '.join(sites[:FEW_NAMES])} and {len(sites) - FEW_NAMES} others"


def _ordered(found: History, sites: Sequence[str]) -> list[str]:
    """By group, within it by the first move; who never moved comes last, who is in no group at the very end."""
    first: dict[str, int] = {}
    for move in found.moves:
        first.setdefault(move.site, move.round)
    everybody = dict.fromkeys([*sites, *(site for members in found.groups for site in members)])
    groups = {name: place for place, name in enumerate(found.names)}
    never = found.rounds[-1] + 1
    return sorted(
        everybody, key=lambda site: (groups.get(found.result.get(site, ""), len(groups)), first.get(site, never))
    )


def _caption(found: History, former: Sequence[str], sites: int) -> str:
    words = "Every site's group from round to round; at the right, the groups "
    words += "of the last round" if found.at == len(found.rounds) - 1 else "of the round at the dotted line"
    words += ", by which the sites are ordered."
    words += " Blank: not yet known." if any(len(members) < sites for members in found.groups) else ""
    if former:
        names = f"{former[0]} to {former[-1]}" if len(former) > 2 else joined(former)
        words += f" {names}: groups of other rounds."
    return words


def _table(sheet: Sheet, record: Record, lens: Lens, found: History) -> None:
    split, scores = record.scores()
    sites: Json = scores.get("sites") or {}
    metric = lens.among(sites)
    theirs: Json = view(scores, "group").get("sites") or {}
    models: Json = scores.get("models") or {}
    names = sorted(set(found.result.values()), key=natural)
    general = {name: number((models.get(f"group/{name}") or {}).get(metric)) for name in names}
    rows: list[list[Cell]] = []
    for name in names:
        mine = sorted((site for site, group in found.result.items() if group == name), key=natural)
        row: list[Cell] = [name, whole(len(mine)), _listed(mine), score(metric, _together(sites, mine, metric))]
        row += [score(metric, _together(theirs, mine, metric))] if theirs else []
        row += [score(metric, general[name])] if any(value is not None for value in general.values()) else []
        rows.append(row)
    columns = [Column("Group"), Column("Sites", True), Column("Who", words=True)]
    columns += [Column("Own models", True)] if record.personal else []
    columns += [Column("Group's model", True)] if theirs or not record.personal else []
    columns += [Column("Group's model, coordinator's set", True)] if len(rows[0]) > len(columns) else []
    how = "pooled" if metric == "accuracy" else "the mean over them"
    sheet.page.table(columns, rows, f"{lens.name(metric)} on {SPLITS[split]} data of the group's sites, {how}.")


def _every_site(sheet: Sheet, found: History) -> None:
    """Where a group has more sites than its row can name."""
    since: dict[str, int] = {}
    count: dict[str, int] = {}
    known = {
        site: turn for turn, members in reversed([*zip(found.rounds, found.groups, strict=True)]) for site in members
    }
    for move in found.moves:
        if move.round <= found.rounds[found.at]:
            since[move.site] = move.round
        count[move.site] = count.get(move.site, 0) + 1
    rows: list[list[Cell]] = [
        [site, found.result[site], whole(since.get(site, known[site])), whole(count.get(site, 0))]
        for site in sorted(found.result, key=natural)
    ]
    columns = [Column("Site"), Column("Group"), Column("Since round", True), Column("Moves in all", True)]
    sheet.page.table(columns, rows, "The group of every site")


def _listed(sites: Sequence[str]) -> str:
    more = len(sites) - MOST_NAMES
    return ", ".join(sites[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _together(sites: Json, members: Sequence[str], metric: str) -> float | None:
    """Accuracy is pooled, each site counting by its examples; other metrics have no exact pooling of sites' values."""
    values = site_values({site: sites.get(site) for site in members}, metric)
    if not values:
        return None
    counts = {site: number(sites[site].get("n")) or 0.0 for site in values}
    if metric != "accuracy" or not sum(counts.values()):
        return fmean(values.values())
    return sum(values[site] * counts[site] for site in values) / sum(counts.values())


def _tree(sheet: Sheet, record: Record, found: History, colours: Mapping[str, str]) -> None:
    until = found.rounds[found.at]
    line: Json = next((one for one in reversed(record.rounds) if one.get("tree") and int(one["round"]) <= until), {})
    tree: Json = line.get("tree") or {}
    leaves, merges = tree.get("leaves") or (), tree.get("merges") or ()
    if len(leaves) < 2 or len(merges) != len(leaves) - 1:
        return
    if len(leaves) > MOST_LEAVES:
        sheet.page.text(f"The tree of {len(leaves)} sites is too large to draw; rounds.jsonl has it.")
        return
    title = TITLES.get(record.part("strategy") or "", "Distance between models")
    words = "The tree that the groups were cut from: the further right two branches meet, the less alike they are."
    if record.part("strategy") == "cfl":
        words = "The cuts that made the groups: what was parted first meets furthest right."
    caption = f"{words} Beside every site, its group; a branch has the colour of its group."
    sheet.draw("tree", group_figures.tree(leaves, merges, found.result, colours, title), caption)


# Who was in which group in every round, and when they moved.

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
