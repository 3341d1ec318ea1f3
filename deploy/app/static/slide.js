// The slide's result: the verdict in words, the interval against the line, what was counted. All figures come from the service.

import { by, capital, count, h, percent, svg } from "./dom.js";

const MARKS = { above: "▲", below: "▼", open: "?" };
const TICKS = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1];
const WIDE = 320;
// a root: 1 % and 50 % can both be told apart, and the same place always means the same
const place = (share) => 10 + Math.sqrt(share) * (WIDE - 24);

/** `notes`: what the page itself has to warn of. */
export function showSlide(told, about, notes = []) {
  by("result").hidden = told === null;
  if (told === null) return showEmpty("No cells yet", "The result stands here once pictures are read.");
  const [verdict, ...why] = told.headline.split(": ");
  const words = [capital(verdict), capital(why.join(": "))];
  showVerdict(told.tone, MARKS[told.tone], ...words);
  showWarnings([...notes, ...told.warnings]);
  by("interval").replaceChildren(...(told.low === null ? [] : [interval(told, about)]));
  by("enough").replaceChildren(enough(told, about));
  by("rows").replaceChildren(...told.rows.map(([what, said]) => h("tr", null, h("th", { scope: "row" }, what), h("td", null, said))));
}

/** For a model without a class that matters: counts and no verdict. */
export function showCounts(found, about, notes) {
  by("result").hidden = false;
  showWarnings(notes);
  showVerdict("open", "", `${count(found.counted)} cells counted`, "This model has no class that matters more than others: no verdict.");
  const rows = [...Object.entries(found.classes), ...Object.entries(found.excluded).map(([why, n]) => [`not counted: ${why}`, n])];
  by("enough").replaceChildren(enough({ counted: found.counted, enough: found.counted >= about.enough }, about));
  by("rows").replaceChildren(...rows.map(([what, n]) => h("tr", null, h("th", { scope: "row" }, what), h("td", null, count(n)))));
}

function showEmpty(title, words) {
  showVerdict("", "", title, words);
}

function showWarnings(all) {
  const said = JSON.stringify(all);
  if (by("warnings").told === said) return;
  by("warnings").told = said;
  by("warnings").replaceChildren(...all.map((words) => h("p", { class: "warning" }, capital(words))));
}

function showVerdict(tone, mark, title, words) {
  const box = by("verdict");
  box.className = `verdict ${tone}`;
  if (box.dataset.told === title + words) return; // nothing new for a screen reader to say
  box.dataset.told = title + words;
  const sign = mark ? h("span", { class: "mark", "aria-hidden": "true" }, mark) : null;
  box.replaceChildren(h("p", { class: "large" }, sign, held(title)), h("p", null, held(words)));
}

/** No line begins with "%". */
const held = (text) => text.replaceAll(" %", "\u00a0%");

function interval(told, about) {
  const words = `${percent(told.prevalence)} (95 %: ${percent(told.low)} to ${percent(told.high)})`;
  const [low, high, here, line] = [told.low, told.high, told.prevalence, about.line].map(place);
  const label = `corrected share ${words}, against the line of ${percent(about.line, 0)}`;
  return h(
    "figure",
    { class: `interval ${told.tone}` },
    h("figcaption", null, `Corrected share of ${told.positive}: `, h("strong", null, words)),
    svg(
      "svg",
      { viewBox: `0 0 ${WIDE} 54`, role: "img", "aria-label": label },
      svg("rect", { class: "trough", x: place(0), y: 19, width: place(1) - place(0), height: 8, rx: 4 }),
      svg("rect", { class: "range", x: low, y: 17, width: Math.max(2, high - low), height: 12, rx: 3 }),
      svg("path", { class: "limit", d: `M${line} 10V36` }),
      svg("text", { class: "limit", x: line, y: 8, "text-anchor": "start" }, `line: ${percent(about.line, 0)}`),
      svg("circle", { class: "here", cx: here, cy: 23, r: 5 }),
      TICKS.map((tick) => svg("path", { class: "tick", d: `M${place(tick)} 36v4` })),
      TICKS.map((tick) => svg("text", { x: place(tick), y: 52, "text-anchor": tick === 1 ? "end" : "middle" }, `${100 * tick}${tick === 1 ? " %" : ""}`)),
    ),
  );
}

function enough(told, about) {
  const missing = about.enough - told.counted;
  const words = told.enough ? `${count(told.counted)} red cells counted` : `${count(told.counted)} of ${count(about.enough)} red cells counted`;
  const more = told.enough ? "" : `; ${count(missing)} more would make a full count`;
  return h("label", { class: "enough" }, words + more, h("progress", { max: about.enough, value: Math.min(told.counted, about.enough) }));
}
