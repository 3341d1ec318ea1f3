// The slide's result: the verdict, the interval against the threshold, the counts. The service computes all numbers.

import { byId, capitalize, formatCount, formatPercent, h, svg } from "./dom.js";

const MARKS = { above: "▲", below: "▼", open: "?" };
const TICKS = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1];
const WIDTH = 320;
// a square root scale shows both 1 % and 50 %
const toX = (fraction) => 10 + Math.sqrt(fraction) * (WIDTH - 24);

export function showNoResult(title, text) {
  byId("result").hidden = true;
  showVerdict("", "", title, text);
}

/** `notes`: warnings of the page itself. */
export function showSlide(slide, model, notes) {
  byId("result").hidden = false;
  const [verdict, ...reason] = slide.headline.split(": ");
  showVerdict(slide.tone, MARKS[slide.tone], capitalize(verdict), capitalize(reason.join(": ")));
  showWarnings([...notes, ...slide.reliability_warnings, ...slide.notes]);
  byId("interval").replaceChildren(...(slide.prevalence_low === null ? [] : [intervalFigure(slide, model)]));
  byId("cell-count").replaceChildren(cellCountBar(slide.num_counted, slide.has_enough_cells, model));
  byId("rows").replaceChildren(...slide.rows.map(([label, value]) => tableRow(label, value)));
}

/** Without a positive class there are counts but no verdict. */
export function showCounts(slide, classCounts, model, notes) {
  byId("result").hidden = false;
  showWarnings([...notes, ...slide.notes]);
  showVerdict("open", "", `${formatCount(slide.num_counted)} cells counted`, "This model has no positive class: no verdict.");
  const rows = [...Object.entries(classCounts), ...Object.entries(slide.excluded).map(([reason, n]) => [`not counted: ${reason}`, n])];
  byId("cell-count").replaceChildren(cellCountBar(slide.num_counted, slide.has_enough_cells, model));
  byId("rows").replaceChildren(...rows.map(([label, n]) => tableRow(label, formatCount(n))));
}

const tableRow = (label, value) => h("tr", null, h("th", { scope: "row" }, label), h("td", null, value));

function showWarnings(warnings) {
  const key = JSON.stringify(warnings);
  if (byId("warnings").contentKey === key) return;
  byId("warnings").contentKey = key;
  byId("warnings").replaceChildren(...warnings.map((text) => h("p", { class: "warning" }, capitalize(text))));
}

function showVerdict(tone, mark, title, text) {
  const box = byId("verdict");
  box.className = `verdict ${tone}`;
  if (box.dataset.contentKey === title + text) return; // unchanged: a screen reader would repeat it
  box.dataset.contentKey = title + text;
  const sign = mark ? h("span", { class: "mark", "aria-hidden": "true" }, mark) : null;
  box.replaceChildren(h("p", { class: "large" }, sign, keepPercentSigns(title)), h("p", null, keepPercentSigns(text)));
}

/** Keeps a line from beginning with "%". */
const keepPercentSigns = (text) => text.replaceAll(" %", "\u00a0%");

function intervalFigure(slide, model) {
  const threshold = formatPercent(model.suspicion_threshold, 0);
  const text = `${formatPercent(slide.prevalence)} (95 %: ${formatPercent(slide.prevalence_low)} to ${formatPercent(slide.prevalence_high)})`;
  const [low, high, estimate, limit] = [slide.prevalence_low, slide.prevalence_high, slide.prevalence, model.suspicion_threshold].map(toX);
  const label = `corrected prevalence ${text}, against the threshold of ${threshold}`;
  return h(
    "figure",
    { class: `interval ${slide.tone}` },
    h("figcaption", null, `Corrected prevalence of ${slide.positive_class}: `, h("strong", null, text)),
    svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} 54`, role: "img", "aria-label": label },
      svg("rect", { class: "trough", x: toX(0), y: 19, width: toX(1) - toX(0), height: 8, rx: 4 }),
      svg("rect", { class: "range", x: low, y: 17, width: Math.max(2, high - low), height: 12, rx: 3 }),
      svg("path", { class: "limit", d: `M${limit} 10V36` }),
      svg("text", { class: "limit", x: limit, y: 8, "text-anchor": "start" }, `threshold: ${threshold}`),
      svg("circle", { class: "here", cx: estimate, cy: 23, r: 5 }),
      TICKS.map((tick) => svg("path", { class: "tick", d: `M${toX(tick)} 36v4` })),
      TICKS.map((tick) => svg("text", { x: toX(tick), y: 52, "text-anchor": tick === 1 ? "end" : "middle" }, `${100 * tick}${tick === 1 ? " %" : ""}`)),
    ),
  );
}

function cellCountBar(numCounted, hasEnough, model) {
  const recommended = model.recommended_cells;
  const text = hasEnough
    ? `${formatCount(numCounted)} red cells counted`
    : `${formatCount(numCounted)} of ${formatCount(recommended)} red cells counted; ${formatCount(recommended - numCounted)} more would make a full count`;
  return h("label", { class: "cell-count" }, text, h("progress", { max: recommended, value: Math.min(numCounted, recommended) }));
}
