"""The section of a run's report about groups: who is in which, who moved when, and the tree that they were cut from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from pipeline.reports import group_figures
from pipeline.reports.group_history import History, history, natural
from pipeline.reports.lens import Lens
from pipeline.reports.page import Cell, Column
from pipeline.reports.record import Json, Record, number, site_values, view
from pipeline.reports.sheet import Sheet
from pipeline.reports.words import SPLITS, count_of, joined, score, whole

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
