// Saves the result as a file, in the format of `hemofed predict --json` (docs/schemas/slide.json).

import { cellClass, cellState, countClasses } from "./cells.js";
import { h } from "./dom.js";

const CELL_KEYS = ["class", "probability", "probability_class", "is_flagged", "is_counted", "exclusion_reason"];

export function saveResult(fields, slide, point, model) {
  const { format, curve, card, max_bytes, ...bundle } = model;
  const images = fields.map((field) => ({ sha256: field.sha256, ...(field.image ? imageRecord(field, point, model) : { path: field.name, error: field.error }) }));
  const result = { format, notice: model.notice, saved: new Date().toISOString(), bundle, images, slide, written: [] };
  const url = URL.createObjectURL(new Blob([JSON.stringify(result, null, 1) + "\n"], { type: "application/json" }));
  const link = h("a", { href: url, download: `slide-${result.saved.slice(0, 19).replaceAll(":", "")}.json` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** The cells at the page's operating point, without what identifies the patient (`summary`). */
function imageRecord({ image, duplicateOf }, point, model) {
  const { summary: _, data_url: __, ...record } = image;
  const cells = image.cells.map((cell) => {
    const { log_odds: _, ...rest } = cell;
    return { ...rest, class: cellClass(cell, point, model), is_flagged: cellState(cell, point) === "flagged" };
  });
  const counts = image.kind === "field" ? { counts: countClasses([image], point, model) } : Object.fromEntries(CELL_KEYS.map((key) => [key, cells[0][key]]));
  return { ...record, ...counts, duplicate_of: duplicateOf, cells };
}
