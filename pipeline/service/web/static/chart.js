// A line chart as SVG, drawn for the width that there is. Colours are classes; names stand beside their lines.

import { h, svg } from "./dom.js";
import { isNumber, shorten, whole } from "./words.js";

const HEIGHT = 230;
const TOP = 10;
const BOTTOM = 26;
const LEFT = 50;
const LABEL = 13; // pixels a name needs
const NAMED = 8; // more lines than this are not named one by one
const MOST = 400; // points of a line; a screen has no more

/**
 * A figure that fits itself, of {id, title, desc, format(tick, step, highest), exact(value), from?,
 * lines: [{name, kind, shade, points: [[round, value]]}]}
 */
export function chart(spec) {
  const readout = h("p", { class: "readout quiet" });
  const canvas = h("div", { class: "canvas" });
  const figure = h("figure", { class: "chart", id: spec.id }, h("figcaption", null, spec.title), canvas, readout);
  let drawn = 0;
  const fit = new ResizeObserver(([change]) => {
    const width = Math.round(change.contentRect.width);
    if (width && width !== drawn) canvas.replaceChildren(draw(spec, (drawn = width), readout));
  });
  fit.observe(canvas);
  return figure;
}

function draw(spec, width, readout) {
  const [low, high] = extent(spec.lines, 1);
  const [first, reached] = extent(spec.lines, 0);
  const ticks = niceTicks(Math.min(low, spec.from ?? low), high);
  const right = width < 420 ? 66 : 96;
  const last = Math.max(reached, 1);
  const x = (round) => LEFT + ((round - first) / (last - first || 1)) * (width - LEFT - right);
  const y = (value) => TOP + (1 - (value - ticks[0]) / (ticks.at(-1) - ticks[0] || 1)) * (HEIGHT - TOP - BOTTOM);
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const drawing = svg(
    "svg",
    {
      viewBox: `0 0 ${width} ${HEIGHT}`,
      width,
      height: HEIGHT,
      role: "img",
      "aria-labelledby": `${spec.id}-title ${spec.id}-desc`,
    },
    svg("title", { id: `${spec.id}-title` }, spec.title),
    svg("desc", { id: `${spec.id}-desc` }, spec.desc),
    ticks.map((tick) => [
      svg("line", { class: "grid", x1: LEFT, x2: width - right, y1: y(tick), y2: y(tick) }),
      svg(
        "text",
        { x: LEFT - 7, y: y(tick) + 4, "text-anchor": "end" },
        spec.format(tick, ticks[1] - ticks[0], ticks.at(-1)),
      ),
    ]),
    roundTicks(first, last, (width - LEFT - right) / 60).map((round) =>
      svg("text", { x: x(round), y: HEIGHT - 8, "text-anchor": "middle" }, whole(round)),
    ),
    svg("text", { class: "axis", x: width - right + 8, y: HEIGHT - 8 }, "round"),
    spec.lines.map((line) => trace(line, x, y)),
    labels(spec.lines, y, width - right + 8, shorten, right < 80 ? 9 : 13),
    cursor,
  );
  follow(drawing, spec, { x, first, last, width, right, cursor, readout });
  return drawing;
}

function trace(line, x, y) {
  const every = Math.ceil(line.points.length / MOST);
  const kept = line.points.filter((_, place) => place % every === 0 || place === line.points.length - 1);
  const path = kept
    .map(([round, value], place) => `${place ? "L" : "M"}${x(round).toFixed(1)} ${y(value).toFixed(1)}`)
    .join("");
  const dot =
    kept.length === 1 && svg("circle", { class: `dot ${line.shade}`, cx: x(kept[0][0]), cy: y(kept[0][1]), r: 3 });
  return [svg("path", { class: `line ${line.kind} ${line.shade}`, d: path }), dot];
}

/** Names at the right ends, moved apart; of many lines only the lowest, the highest and the main one. */
function labels(lines, y, x, cut, letters) {
  const ends = lines
    .filter((line) => line.points.length)
    .map((line) => ({ line, y: y(line.points.at(-1)[1]) }))
    .sort((a, b) => a.y - b.y);
  const thin = ends.filter((end) => end.line.kind === "site");
  const kept =
    thin.length <= NAMED
      ? ends
      : ends.filter((end) => end.line.kind !== "site" || end === thin[0] || end === thin.at(-1));
  let free = TOP;
  for (const end of kept) free = (end.at = Math.max(end.y, free)) + LABEL;
  let limit = HEIGHT - BOTTOM;
  for (const end of [...kept].reverse()) limit = (end.at = Math.min(end.at, limit)) - LABEL;
  return kept.map(({ line, at, y: from }) => [
    svg("line", { class: `leader ${line.shade}`, x1: x - 7, y1: from, x2: x - 1, y2: at }),
    svg("text", { class: `name ${line.kind} ${line.shade}`, x: x + 2, y: at + 4 }, cut(line.name, letters)),
  ]);
}

/** What the lines say at the round under the pointer. */
function follow(drawing, spec, { x, first, last, width, right, cursor, readout }) {
  const tell = (event) => {
    const box = drawing.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width) * width;
    const round = Math.round(first + ((share - LEFT) / (width - LEFT - right)) * (last - first));
    const said = spec.lines
      .map((line) => [line.name, line.points.find((point) => point[0] === round)])
      .filter(([, point]) => point);
    if (!said.length) return;
    cursor.setAttribute("x1", x(round));
    cursor.setAttribute("x2", x(round));
    cursor.setAttribute("visibility", "visible");
    const shown = said.slice(0, NAMED + 1).map(([name, point]) => `${shorten(name)} ${spec.exact(point[1])}`);
    readout.textContent = `Round ${round}: ${shown.join(", ")}${said.length > shown.length ? ", …" : ""}`;
  };
  drawing.addEventListener("pointermove", tell);
  drawing.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    readout.textContent = "";
  });
}

/** Lowest and highest; a long run at many sites has more points than a call takes arguments. */
function extent(lines, axis) {
  let [low, high] = [Infinity, -Infinity];
  for (const { points } of lines) {
    for (const point of points) {
      low = Math.min(low, point[axis]);
      high = Math.max(high, point[axis]);
    }
  }
  return low <= high ? [low, high] : [0, 1];
}

function niceTicks(low, high) {
  const spread = high - low || Math.abs(high) || 1;
  const rough = spread / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((part) => part * power).find((part) => part >= rough);
  const ticks = [];
  for (let place = Math.floor(low / step); place <= Math.ceil(high / step - 1e-9) || ticks.length < 2; place += 1)
    ticks.push(place * step);
  return ticks;
}

function roundTicks(first, last, most) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((part) => (last - first) / part <= most) ?? last;
  const ticks = [];
  for (let round = Math.ceil(first / step) * step; round <= last; round += step) ticks.push(round);
  return ticks;
}

export const defined = (points) => points.filter((point) => isNumber(point[1]));
