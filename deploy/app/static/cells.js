// The state of a cell at an operating point. The page counts flagged cells, the service computes the slide's result.

import { capitalize, formatProbability } from "./dom.js";

// distinguished by color and by line style; the colors are those of deploy/slide/overlays.py
export const CELL_STATES = {
  flagged: { color: "#d0202c", width: 3, dash: [], label: "flagged" },
  counted: { color: "#1c6ea4", width: 1.5, dash: [], label: "counted" },
  rejected: { color: "#d68600", width: 2, dash: [7, 4], label: "rejected" },
  excluded: { color: "#787878", width: 1.5, dash: [1.5, 3], label: "excluded" },
};

export function cellState(cell, point) {
  if (!cell.is_counted) return cell.kind === "red" ? "rejected" : "excluded";
  return isAbove(cell, point) ? "flagged" : "counted";
}

const isAbove = (cell, point) => Boolean(point) && cell.log_odds !== null && cell.log_odds >= point.log_odds;

/** The class at this operating point: the model's class, unless that is the positive one and the point disagrees. */
export function cellClass(cell, point, model) {
  if (!point || model.positive_class === null) return cell.class;
  if (isAbove(cell, point)) return model.positive_class;
  if (cell.class !== model.positive_class) return cell.class;
  const others = model.classes.filter((name) => name !== model.positive_class);
  return others.length === 1 ? others[0] : `not ${model.positive_class}`;
}

export function describeCell(cell, point, model) {
  const state = cellState(cell, point);
  if (state === "excluded") return `Excluded: ${cell.exclusion_reason}`;
  if (state === "rejected") return `Rejected: ${cell.exclusion_reason}`;
  const probabilityClass = model.positive_class ?? cell.class;
  const limit = point ? ` (flagged from ${formatProbability(point.probability)})` : "";
  return `${capitalize(cellClass(cell, point, model))}: probability of ${probabilityClass} ${formatProbability(cell.probability)}${limit}`;
}

export const countFlagged = (image, point) => image.cells.filter((cell) => cellState(cell, point) === "flagged").length;

/** Counted cells by class. */
export function countClasses(images, point, model) {
  const counts = {};
  for (const cell of images.flatMap((image) => image.cells)) {
    if (!cell.is_counted) continue;
    const name = cellClass(cell, point, model);
    counts[name] = (counts[name] ?? 0) + 1;
  }
  return counts;
}
