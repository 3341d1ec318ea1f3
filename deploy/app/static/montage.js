// The most suspicious cells of the slide; each tile opens its field.

import { cellState } from "./cells.js";
import { byId, formatProbability, h } from "./dom.js";
import { MAX_TILES } from "./drawing.js";

export function showMontage(fields, point, model, openCell) {
  const tiles = fields
    .flatMap((field) => field.tiles.map((tile) => ({ field, ...tile })))
    .sort((a, b) => b.score - a.score)
    .slice(0, MAX_TILES);
  byId("montage").hidden = tiles.length === 0;
  byId("montage-title").textContent = model.positive_class === null ? "Most confident predictions" : "Most suspicious cells";
  const key = JSON.stringify([point?.log_odds, tiles.map(({ field, index }) => [field.id, index])]);
  if (byId("tiles").contentKey === key) return; // unchanged: keep the focus
  byId("tiles").contentKey = key;
  byId("tiles").replaceChildren(...tiles.map((tile) => tileButton(tile, point, model, openCell)));
}

function tileButton({ field, index, canvas }, point, model, openCell) {
  const cell = field.image.cells[index];
  const isFlagged = cellState(cell, point) === "flagged";
  const shown = model.positive_class === null ? cell.class : cell.probability.toFixed(2);
  const details = `${isFlagged ? "flagged, " : ""}probability ${formatProbability(cell.probability)}, in ${field.name}`;
  return h(
    "button",
    { type: "button", class: isFlagged ? "tile flagged" : "tile", "aria-label": `${shown}: ${details}`, title: details, onclick: () => openCell(field, index) },
    canvas,
    h("span", null, isFlagged ? `⚑ ${shown}` : shown),
  );
}
