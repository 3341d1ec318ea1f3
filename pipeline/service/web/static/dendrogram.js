// Dendrogram of the sites. As in scipy's linkage, merges[i] = (a, b, distance, size) creates node leaves.length + i.

import { h, svg, table } from "./dom.js";
import { formatCountOf, truncate } from "./format.js";

const ROW_HEIGHT = 22;
const LEFT = 150;
const WIDTH = 620;
const AXIS_HEIGHT = 30;

/** `clusterBySite` and `colors` (cluster -> class): a branch whose sites are all in one cluster has the cluster's colour. */
export function dendrogram({ leaves, merges }, clusterBySite, colors) {
  const nodes = leaves.map((site) => ({ sites: [site], distance: 0 }));
  for (const [first, second, distance] of merges) {
    const children = [nodes[first], nodes[second]];
    nodes.push({ children, distance, sites: children.flatMap((node) => node.sites) });
  }
  // without merges every leaf is a root
  const roots = nodes.slice(-1).concat(merges.length ? [] : nodes.slice(0, -1));
  const order = roots.flatMap((node) => node.sites);
  const maxDistance = Math.max(...merges.map((merge) => merge[2]), 1e-12);
  const x = (distance) => LEFT + (distance / maxDistance) * (WIDTH - LEFT - 12);
  const y = (node) =>
    node.children
      ? (y(node.children[0]) + y(node.children[1])) / 2
      : order.indexOf(node.sites[0]) * ROW_HEIGHT + ROW_HEIGHT / 2;
  const branchColor = (node) => {
    const clusters = new Set(node.sites.map((site) => clusterBySite[site]));
    return clusters.size === 1 ? (colors.get([...clusters][0]) ?? "mixed") : "mixed";
  };
  const branches = nodes
    .filter((node) => node.children)
    .map((node) => {
      const [a, b] = node.children;
      return svg("path", {
        class: `branch ${branchColor(node)}`,
        d: `M${x(a.distance)} ${y(a)}H${x(node.distance)}V${y(b)}H${x(b.distance)}`,
      });
    });
  const names = order.map((site, row) =>
    svg(
      "text",
      { x: LEFT - 8, y: row * ROW_HEIGHT + ROW_HEIGHT / 2 + 4, "text-anchor": "end" },
      truncate(site, 15),
      clusterBySite[site] === undefined
        ? ""
        : svg("tspan", { class: `name ${colors.get(clusterBySite[site])}` }, ` · ${truncate(clusterBySite[site], 6)}`),
    ),
  );
  const height = ROW_HEIGHT * order.length + AXIS_HEIGHT;
  const axis = [0, maxDistance / 2, maxDistance].map((distance) => [
    svg("line", { class: "grid", x1: x(distance), x2: x(distance), y1: 0, y2: height - AXIS_HEIGHT + 4 }),
    svg(
      "text",
      { class: "axis", x: x(distance), y: height - 10, "text-anchor": distance === maxDistance ? "end" : "middle" },
      Number(distance.toPrecision(2)).toString(),
    ),
  ]);
  const mostSimilar = merges.length ? `The most similar sites are ${nodes[leaves.length].sites.join(" and ")}.` : "";
  const rows = merges.map((merge, step) => [
    String(step + 1),
    nodes[merge[0]].sites.join(", "),
    nodes[merge[1]].sites.join(", "),
    Number(merge[2].toPrecision(3)).toString(),
  ]);
  return h(
    "figure",
    null,
    h("figcaption", null, "Dendrogram: the further right two sites meet, the more they differ"),
    svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${height}`, class: "fits", role: "img", "aria-labelledby": "tree-title tree-desc" },
      svg("title", { id: "tree-title" }, "Dendrogram of the sites"),
      svg("desc", { id: "tree-desc" }, `${formatCountOf(leaves.length, "site")}. ${mostSimilar}`),
      axis,
      branches,
      names,
    ),
    h(
      "details",
      { id: "tree-table" },
      h("summary", null, "Show the dendrogram as table"),
      table(
        "Merges, most similar first",
        [
          { title: "Step" },
          { title: "First branch", text: true },
          { title: "Second branch", text: true },
          { title: "Distance", number: true },
        ],
        rows,
      ),
    ),
  );
}
