// The result as a file, made in the browser; its shape is that of `hemofed predict --json`.

import { classOf, kindOf } from "./cells.js";
import { h } from "./dom.js";

const NOT_KEPT = new Set(["image", "traits", "counts", "excluded", "class", "probability", "probability_of", "flagged", "counted", "why"]);

export function save(fields, slide, point, about) {
  const { curve, card, most, ...bundle } = about;
  const images = fields.map((field) => ({ sha256: field.digest, ...(field.picture ? told(field.picture, point, about) : { path: field.name, error: field.error }) }));
  const result = { notice: about.notice, saved: new Date().toISOString(), bundle, images, slide };
  const url = URL.createObjectURL(new Blob([JSON.stringify(result, null, 1) + "\n"], { type: "application/json" }));
  const link = h("a", { href: url, download: `slide-${result.saved.slice(0, 19).replaceAll(":", "")}.json` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function told(picture, point, about) {
  const kept = Object.fromEntries(Object.entries(picture).filter(([name]) => !NOT_KEPT.has(name)));
  const cells = picture.cells.map((cell) => {
    const { log_odds: _, ...rest } = cell;
    return { ...rest, class: classOf(cell, point, about), flagged: kindOf(cell, point) === "flagged" };
  });
  return { ...kept, cells };
}
