// Saves the result as a file, in the format of `hemofed predict --json`.

import { cellClass, cellState } from "./cells.js";
import { h } from "./dom.js";

const OMITTED_KEYS = new Set([
  "data_url", "feature_mean", "counts", "excluded", "class", "probability", "probability_class", "is_flagged", "is_counted", "exclusion_reason",
]);

export function saveResult(fields, slide, point, model) {
  const { curve, card, max_bytes, ...bundle } = model;
  const images = fields.map((field) => ({ sha256: field.digest, ...(field.image ? imageRecord(field.image, point, model) : { path: field.name, error: field.error }) }));
  const result = { notice: model.notice, saved: new Date().toISOString(), bundle, images, slide };
  const url = URL.createObjectURL(new Blob([JSON.stringify(result, null, 1) + "\n"], { type: "application/json" }));
  const link = h("a", { href: url, download: `slide-${result.saved.slice(0, 19).replaceAll(":", "")}.json` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function imageRecord(image, point, model) {
  const record = Object.fromEntries(Object.entries(image).filter(([name]) => !OMITTED_KEYS.has(name)));
  const cells = image.cells.map((cell) => {
    const { log_odds: _, ...rest } = cell;
    return { ...rest, class: cellClass(cell, point, model), is_flagged: cellState(cell, point) === "flagged" };
  });
  return { ...record, cells };
}
