// The tree of sites: merges[i] = (a, b, distance, leaves) makes node len(leaves) + i, as scipy's linkage has it.

import { h, svg, table } from "./dom.js";
import { countOf, shorten } from "./words.js";

const ROW = 22;
const LEFT = 150;
const WIDTH = 620;
const FOOT = 30;

/** A branch has its group's colour as long as all of it is in one group. */
export function dendrogram({ leaves, merges }, groups, shades) {
  const nodes = leaves.map((site) => ({ sites: [site], distance: 0 }));
  for (const [first, second, distance] of merges) {
    const parts = [nodes[first], nodes[second]];
    nodes.push({ parts, distance, sites: parts.flatMap((node) => node.sites) });
  }
  const tops = nodes
    .slice(-1)
    .concat(nodes.length === leaves.length ? leaves.slice(0, -1).map((_, place) => nodes[place]) : []);
  const order = tops.flatMap((node) => node.sites);
  const furthest = Math.max(...merges.map((merge) => merge[2]), 1e-12);
  const x = (distance) => LEFT + (distance / furthest) * (WIDTH - LEFT - 12);
  const place = (node) =>
    node.parts ? (place(node.parts[0]) + place(node.parts[1])) / 2 : order.indexOf(node.sites[0]) * ROW + ROW / 2;
  const shade = (node) => {
    const found = new Set(node.sites.map((site) => groups[site]));
    return found.size === 1 ? (shades.get([...found][0]) ?? "mixed") : "mixed";
  };
  const branches = nodes
    .filter((node) => node.parts)
    .map((node) => {
      const [a, b] = node.parts;
      return svg("path", {
        class: `branch ${shade(node)}`,
        d: `M${x(a.distance)} ${place(a)}H${x(node.distance)}V${place(b)}H${x(b.distance)}`,
      });
    });
  const names = order.map((site, row) =>
    svg(
      "text",
      { x: LEFT - 8, y: row * ROW + ROW / 2 + 4, "text-anchor": "end" },
      shorten(site, 15),
      groups[site] === undefined
        ? ""
        : svg("tspan", { class: `name ${shades.get(groups[site])}` }, ` · ${shorten(groups[site], 6)}`),
    ),
  );
  const height = ROW * order.length + FOOT;
  const axis = [0, furthest / 2, furthest].map((distance) => [
    svg("line", { class: "grid", x1: x(distance), x2: x(distance), y1: 0, y2: height - FOOT + 4 }),
    svg(
      "text",
      { class: "axis", x: x(distance), y: height - 10, "text-anchor": distance === furthest ? "end" : "middle" },
      Number(distance.toPrecision(2)).toString(),
    ),
  ]);
  const nearest = merges.length ? `The nearest are ${nodes[leaves.length].sites.join(" and ")}.` : "";
  const rows = merges.map((merge, step) => [
    String(step + 1),
    nodes[merge[0]].sites.join(", "),
    nodes[merge[1]].sites.join(", "),
    Number(merge[2].toPrecision(3)).toString(),
  ]);
  return h(
    "figure",
    null,
    h("figcaption", null, "Tree of the sites: the further right two meet, the more they differ"),
    svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${height}`, class: "fits", role: "img", "aria-labelledby": "tree-drawn tree-told" },
      svg("title", { id: "tree-drawn" }, "Tree of the sites"),
      svg("desc", { id: "tree-told" }, `${countOf(leaves.length, "site")}. ${nearest}`),
      axis,
      branches,
      names,
    ),
    h(
      "details",
      { id: "tree-table" },
      h("summary", null, "Show the tree as table"),
      table(
        "Merges, the nearest first",
        [
          { title: "Step" },
          { title: "One side", words: true },
          { title: "Other side", words: true },
          { title: "Distance", number: true },
        ],
        rows,
      ),
    ),
  );
}
