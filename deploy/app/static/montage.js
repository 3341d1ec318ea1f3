// The most suspicious cells of the slide, side by side; each leads to its field.

import { kindOf } from "./cells.js";
import { by, h, probability } from "./dom.js";
import { MOST } from "./drawing.js";

export function showMontage(fields, point, about, go) {
  const best = fields
    .flatMap((field) => field.tiles.map((tile) => ({ field, ...tile })))
    .sort((a, b) => b.score - a.score)
    .slice(0, MOST);
  by("most").hidden = best.length === 0;
  by("most-title").textContent = about.positive === null ? "Surest answers" : "Most suspicious cells";
  const key = JSON.stringify([point?.log_odds, best.map(({ field, place }) => [field.id, place])]);
  if (by("tiles").told === key) return; // who has the focus keeps it
  by("tiles").told = key;
  by("tiles").replaceChildren(...best.map((tile) => button(tile, point, about, go)));
}

function button({ field, place, canvas }, point, about, go) {
  const cell = field.picture.cells[place];
  const flagged = kindOf(cell, point) === "flagged";
  const p = probability(cell.probability);
  const words = `${flagged ? "flagged, " : ""}probability ${p}, in ${field.name}`;
  return h(
    "button",
    { type: "button", class: flagged ? "tile flagged" : "tile", "aria-label": words, title: words, onclick: () => go(field, place) },
    canvas,
    h("span", null, flagged ? `⚑ ${cell.probability.toFixed(2)}` : about.positive === null ? cell.class : cell.probability.toFixed(2)),
  );
}
