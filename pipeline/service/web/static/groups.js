// Who is with whom: groups now, how they changed, and the tree where the algorithm has one.

import { h, svg, table } from "./dom.js";
import { dendrogram } from "./dendrogram.js";
import { countOf, joined, shorten } from "./words.js";

const ROW = 22;
const LEFT = 118;
const WIDTH = 620;
const SHADES = 8;

export const grouped = (records) => records.filter((record) => record.groups && Object.keys(record.groups).length);

/** group name -> class of its colour; names stand beside colours everywhere. */
export function shadesOf(records) {
  const names = [...new Set(records.flatMap((record) => Object.values(record.groups)))].sort((a, b) =>
    a.localeCompare(b, undefined, { numeric: true }),
  );
  return new Map(names.map((name, place) => [name, place < SHADES ? `c${place}` : "many"]));
}

export function groupsBody(records) {
  const having = grouped(records);
  const last = having.at(-1);
  const shades = shadesOf(having);
  const members = Map.groupBy
    ? Map.groupBy(Object.keys(last.groups), (site) => last.groups[site])
    : byGroup(last.groups);
  const rows = [...members]
    .sort(([a], [b]) => a.localeCompare(b, undefined, { numeric: true }))
    .map(([group, sites]) => [
      h("span", { class: `key ${shades.get(group)}` }, `group ${group}`),
      String(sites.length),
      joined(sites.sort()),
    ]);
  const moves = changes(having);
  return [
    table(
      `Groups after round ${last.round}`,
      [{ title: "Group" }, { title: "Sites", number: true }, { title: "Members", words: true }],
      rows,
      { id: "group-table" },
    ),
    h(
      "div",
      { class: "pair-of-charts drawings" },
      last.tree && dendrogram(last.tree, last.groups, shades),
      timeline(having, last, shades),
    ),
    h(
      "details",
      { id: "group-moves" },
      h("summary", null, `${countOf(moves.length, "change")} of group`),
      moves.length
        ? table(
            "Sites that changed their group",
            [{ title: "Round" }, { title: "Site" }, { title: "From" }, { title: "To" }],
            moves,
          )
        : h("p", { class: "quiet" }, "Every site has stayed where it was."),
    ),
  ];
}

function byGroup(groups) {
  const found = new Map();
  for (const [site, group] of Object.entries(groups)) found.set(group, [...(found.get(group) ?? []), site]);
  return found;
}

function changes(having) {
  const found = [];
  for (let place = 1; place < having.length; place += 1) {
    for (const [site, group] of Object.entries(having[place].groups)) {
      const before = having[place - 1].groups[site];
      if (before !== undefined && before !== group) found.push([String(having[place].round), site, before, group]);
    }
  }
  return found;
}

/** A row a site, a bar for every stretch in one group, with the group's name in it. */
function timeline(having, last, shades) {
  const sites = Object.keys(last.groups).sort(
    (a, b) => last.groups[a].localeCompare(last.groups[b], undefined, { numeric: true }) || a.localeCompare(b),
  );
  const height = ROW * sites.length + 24;
  const [from, to] = [having[0].round, having.at(-1).round + 1];
  const x = (round) => LEFT + ((round - from) / (to - from)) * (WIDTH - LEFT);
  const bars = sites.map((site, row) => [
    svg("text", { x: LEFT - 8, y: row * ROW + 15, "text-anchor": "end" }, shorten(site, 16)),
    stretches(having, site, to).map(([group, begin, end]) => [
      svg("rect", {
        class: `stretch ${shades.get(group)}`,
        x: x(begin),
        y: row * ROW + 3,
        width: Math.max(1, x(end) - x(begin) - 1),
        height: ROW - 6,
        rx: 2,
      }),
      x(end) - x(begin) > 10 + 7 * group.length
        ? svg("text", { class: "inside", x: x(begin) + 5, y: row * ROW + 15 }, shorten(group, 12))
        : null,
    ]),
  ]);
  const axis = [from, to - 1].map((round, place) =>
    svg(
      "text",
      { class: "axis", x: place ? WIDTH : LEFT, y: height - 4, "text-anchor": place ? "end" : "start" },
      `round ${round}`,
    ),
  );
  const words = `${countOf(sites.length, "site")}, rounds ${from} to ${to - 1}; the changes are in the list below.`;
  return h(
    "figure",
    null,
    h("figcaption", null, "Groups over the rounds"),
    svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${height}`, class: "fits", role: "img", "aria-labelledby": "groups-drawn groups-told" },
      svg("title", { id: "groups-drawn" }, "Groups over the rounds"),
      svg("desc", { id: "groups-told" }, words),
      bars,
      axis,
    ),
  );
}

function stretches(having, site, end) {
  const found = [];
  having.forEach((record, place) => {
    const group = record.groups[site];
    const until = having[place + 1]?.round ?? end;
    const last = found.at(-1);
    if (last && last[0] === group && last[2] === record.round) last[2] = until;
    else if (group !== undefined) found.push([group, record.round, until]);
  });
  return found;
}
