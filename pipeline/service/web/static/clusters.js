// Clusters: the sites of each cluster, how this changed over the rounds, and the dendrogram if the strategy has one.

import { h, reachableWhenScrolling, svg, table } from "./dom.js";
import { dendrogram } from "./dendrogram.js";
import { formatCountOf, joinNames, truncate } from "./format.js";

const ROW_HEIGHT = 22;
const LEFT = 118;
const WIDTH = 620;
const NUM_COLORS = 8;

// a round record's `clusters`: site -> cluster
export const withClusters = (records) => records.filter((record) => Object.keys(record.clusters ?? {}).length);

/** cluster -> class of its colour; names are shown as well, because colours repeat. */
function clusterColors(records) {
  const names = [...new Set(records.flatMap((record) => Object.values(record.clusters)))].sort(compareNames);
  return new Map(names.map((name, index) => [name, index < NUM_COLORS ? `c${index}` : "many"]));
}

const compareNames = (a, b) => a.localeCompare(b, undefined, { numeric: true });

/** `records`: rounds with clusters, at least one. */
export function clustersBody(records) {
  const last = records.at(-1);
  const colors = clusterColors(records);
  const rows = [...sitesByCluster(last.clusters)]
    .sort(([a], [b]) => compareNames(a, b))
    .map(([cluster, sites]) => [
      h("span", { class: `key ${colors.get(cluster)}` }, `cluster ${cluster}`),
      String(sites.length),
      joinNames(sites.sort()),
    ]);
  const changes = clusterChanges(records);
  return [
    table(
      `Clusters after round ${last.round}`,
      [{ title: "Cluster" }, { title: "Number of sites", number: true }, { title: "Sites", text: true }],
      rows,
      { id: "cluster-table" },
    ),
    h(
      "div",
      { class: "chart-pair drawings" },
      last.dendrogram && reachableWhenScrolling(dendrogram(last.dendrogram, last.clusters, colors)),
      reachableWhenScrolling(clusterTimeline(records, last, colors)),
    ),
    h(
      "details",
      { id: "cluster-changes" },
      h("summary", null, `${formatCountOf(changes.length, "change")} of cluster`),
      changes.length
        ? table(
            "Sites that changed their cluster",
            [{ title: "Round" }, { title: "Site" }, { title: "From" }, { title: "To" }],
            changes,
          )
        : h("p", { class: "quiet" }, "No site has changed its cluster."),
    ),
  ];
}

function sitesByCluster(clusterBySite) {
  const sites = new Map();
  for (const [site, cluster] of Object.entries(clusterBySite))
    sites.set(cluster, [...(sites.get(cluster) ?? []), site]);
  return sites;
}

/** Rows of [round, site, previous cluster, new cluster]. */
function clusterChanges(records) {
  const changes = [];
  for (let index = 1; index < records.length; index += 1) {
    for (const [site, cluster] of Object.entries(records[index].clusters)) {
      const previous = records[index - 1].clusters[site];
      if (previous !== undefined && previous !== cluster)
        changes.push([String(records[index].round), site, previous, cluster]);
    }
  }
  return changes;
}

/** One row per site, with a labelled bar for every interval in one cluster. */
function clusterTimeline(records, last, colors) {
  const sites = Object.keys(last.clusters).sort(
    (a, b) => compareNames(last.clusters[a], last.clusters[b]) || a.localeCompare(b),
  );
  const height = ROW_HEIGHT * sites.length + 24;
  const [from, to] = [records[0].round, records.at(-1).round + 1];
  const x = (round) => LEFT + ((round - from) / (to - from)) * (WIDTH - LEFT);
  const bars = sites.map((site, row) => [
    svg("text", { x: LEFT - 8, y: row * ROW_HEIGHT + 15, "text-anchor": "end" }, truncate(site, 16)),
    clusterIntervals(records, site, to).map(([cluster, begin, end]) => [
      svg("rect", {
        class: `interval ${colors.get(cluster)}`,
        x: x(begin),
        y: row * ROW_HEIGHT + 3,
        width: Math.max(1, x(end) - x(begin) - 1),
        height: ROW_HEIGHT - 6,
        rx: 2,
      }),
      x(end) - x(begin) > 10 + 7 * cluster.length
        ? svg("text", { class: "inside", x: x(begin) + 5, y: row * ROW_HEIGHT + 15 }, truncate(cluster, 12))
        : null,
    ]),
  ]);
  const axis = [from, to - 1].map((round, index) =>
    svg(
      "text",
      { class: "axis", x: index ? WIDTH : LEFT, y: height - 4, "text-anchor": index ? "end" : "start" },
      `round ${round}`,
    ),
  );
  const desc = `${formatCountOf(sites.length, "site")}, rounds ${from} to ${to - 1}; the list below has the changes.`;
  return h(
    "figure",
    null,
    h("figcaption", null, "Clusters over the rounds"),
    svg(
      "svg",
      {
        viewBox: `0 0 ${WIDTH} ${height}`,
        class: "fits",
        role: "img",
        "aria-labelledby": "timeline-title timeline-desc",
      },
      svg("title", { id: "timeline-title" }, "Clusters over the rounds"),
      svg("desc", { id: "timeline-desc" }, desc),
      bars,
      axis,
    ),
  );
}

/** [cluster, first round, round after the last one]; `end`: the round after the last one of the run. */
function clusterIntervals(records, site, end) {
  const intervals = [];
  records.forEach((record, index) => {
    const cluster = record.clusters[site];
    const until = records[index + 1]?.round ?? end;
    const last = intervals.at(-1);
    if (last && last[0] === cluster && last[2] === record.round) last[2] = until;
    else if (cluster !== undefined) intervals.push([cluster, record.round, until]);
  });
  return intervals;
}
