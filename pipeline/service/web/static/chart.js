// A line chart as SVG, drawn for the available width. Colours are classes; every line is also labelled with its name.

import { h, svg } from "./dom.js";
import { formatCount, isNumber, truncate } from "./format.js";

const HEIGHT = 230;
const TOP = 10;
const BOTTOM = 26;
const LEFT = 50;
const LABEL_HEIGHT = 13; // px
const MAX_LABELLED_SITES = 8; // with more site lines, only the lowest and the highest are labelled
const MAX_POINTS = 400; // of a line; a screen cannot show more

/**
 * A figure that redraws itself when its width changes. `spec`: {id, title, desc, format(tick, step, highest),
 * exact(value), from?, lines: [{name, kind, color, points: [[round, value]]}]}; `from` is a value that the axis includes.
 */
export function lineChart(spec) {
  const readout = h("p", { class: "readout quiet" });
  const canvas = h("div", { class: "canvas" });
  const figure = h("figure", { class: "chart", id: spec.id }, h("figcaption", null, spec.title), canvas, readout);
  let lastWidth = 0;
  const observer = new ResizeObserver(([entry]) => {
    const width = Math.round(entry.contentRect.width);
    if (width && width !== lastWidth) canvas.replaceChildren(drawChart(spec, (lastWidth = width), readout));
  });
  observer.observe(canvas);
  return figure;
}

function drawChart(spec, width, readout) {
  const [low, high] = extent(spec.lines, 1);
  const [first, lastRound] = extent(spec.lines, 0);
  const ticks = valueTicks(Math.min(low, spec.from ?? low), high);
  const right = width < 420 ? 66 : 96;
  const last = Math.max(lastRound, 1);
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
      svg("text", { x: x(round), y: HEIGHT - 8, "text-anchor": "middle" }, formatCount(round)),
    ),
    svg("text", { class: "axis", x: width - right + 8, y: HEIGHT - 8 }, "round"),
    spec.lines.map((line) => linePath(line, x, y)),
    lineLabels(spec.lines, y, width - right + 8, right < 80 ? 9 : 13),
    cursor,
  );
  addReadout(drawing, spec, { x, first, last, width, right, cursor, readout });
  return drawing;
}

function linePath(line, x, y) {
  const every = Math.ceil(line.points.length / MAX_POINTS);
  const points = line.points.filter((_, index) => index % every === 0 || index === line.points.length - 1);
  const path = points
    .map(([round, value], index) => `${index ? "L" : "M"}${x(round).toFixed(1)} ${y(value).toFixed(1)}`)
    .join("");
  const dot =
    points.length === 1 &&
    svg("circle", { class: `dot ${line.color}`, cx: x(points[0][0]), cy: y(points[0][1]), r: 3 });
  return [svg("path", { class: `line ${line.kind} ${line.color}`, d: path }), dot];
}

/** Names at the right ends of the lines, moved apart vertically. */
function lineLabels(lines, y, x, maxLength) {
  const ends = lines
    .filter((line) => line.points.length)
    .map((line) => ({ line, y: y(line.points.at(-1)[1]) }))
    .sort((a, b) => a.y - b.y);
  const siteEnds = ends.filter((end) => end.line.kind === "site");
  const labelled =
    siteEnds.length <= MAX_LABELLED_SITES
      ? ends
      : ends.filter((end) => end.line.kind !== "site" || end === siteEnds[0] || end === siteEnds.at(-1));
  let minY = TOP;
  for (const end of labelled) minY = (end.labelY = Math.max(end.y, minY)) + LABEL_HEIGHT;
  let maxY = HEIGHT - BOTTOM;
  for (const end of [...labelled].reverse()) maxY = (end.labelY = Math.min(end.labelY, maxY)) - LABEL_HEIGHT;
  return labelled.map(({ line, labelY, y: lineY }) => [
    svg("line", { class: `leader ${line.color}`, x1: x - 7, y1: lineY, x2: x - 1, y2: labelY }),
    svg("text", { class: `name ${line.kind} ${line.color}`, x: x + 2, y: labelY + 4 }, truncate(line.name, maxLength)),
  ]);
}

/** Shows the values of the round under the pointer. */
function addReadout(drawing, spec, { x, first, last, width, right, cursor, readout }) {
  const showRound = (event) => {
    const box = drawing.getBoundingClientRect();
    const pointerX = ((event.clientX - box.left) / box.width) * width;
    const round = Math.round(first + ((pointerX - LEFT) / (width - LEFT - right)) * (last - first));
    const values = spec.lines
      .map((line) => [line.name, line.points.find((point) => point[0] === round)])
      .filter(([, point]) => point);
    if (!values.length) return;
    cursor.setAttribute("x1", x(round));
    cursor.setAttribute("x2", x(round));
    cursor.setAttribute("visibility", "visible");
    const texts = values
      .slice(0, MAX_LABELLED_SITES + 1)
      .map(([name, point]) => `${truncate(name)} ${spec.exact(point[1])}`);
    readout.textContent = `Round ${round}: ${texts.join(", ")}${values.length > texts.length ? ", …" : ""}`;
  };
  drawing.addEventListener("pointermove", showRound);
  drawing.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    readout.textContent = "";
  });
}

/** Minimum and maximum. Not by Math.min(...values): a long run at many sites has more points than a call takes arguments. */
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

function valueTicks(low, high) {
  const range = high - low || Math.abs(high) || 1;
  const minStep = range / 4;
  const power = 10 ** Math.floor(Math.log10(minStep));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= minStep);
  const ticks = [];
  for (let index = Math.floor(low / step); index <= Math.ceil(high / step - 1e-9) || ticks.length < 2; index += 1)
    ticks.push(index * step);
  return ticks;
}

function roundTicks(first, last, maxTicks) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((rounds) => (last - first) / rounds <= maxTicks) ?? last;
  const ticks = [];
  for (let round = Math.ceil(first / step) * step; round <= last; round += step) ticks.push(round);
  return ticks;
}

export const finitePoints = (points) => points.filter((point) => isNumber(point[1]));
