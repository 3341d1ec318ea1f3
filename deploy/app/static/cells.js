// What a cell is at an operating point. Counts are made here, statistics by the service.

import { capital, probability } from "./dom.js";

// told apart by colour and by line; the colours are those of deploy/slide/overlays.py
export const KINDS = {
  flagged: { shade: "#d0202c", width: 3, dash: [], words: "flagged" },
  counted: { shade: "#1c6ea4", width: 1.5, dash: [], words: "counted" },
  refused: { shade: "#d68600", width: 2, dash: [7, 4], words: "not answered for" },
  apart: { shade: "#787878", width: 1.5, dash: [1.5, 3], words: "set apart" },
};

export function kindOf(cell, point) {
  if (!cell.counted) return cell.kind === "red" ? "refused" : "apart";
  return reaches(cell, point) ? "flagged" : "counted";
}

const reaches = (cell, point) => Boolean(point) && cell.log_odds !== null && cell.log_odds >= point.log_odds;

/** The class at this point: the model's own word unless that was "positive" and the point says otherwise. */
export function classOf(cell, point, about) {
  if (!point || about.positive === null) return cell.class;
  if (reaches(cell, point)) return about.positive;
  if (cell.class !== about.positive) return cell.class;
  const others = about.classes.filter((name) => name !== about.positive);
  return others.length === 1 ? others[0] : `not ${about.positive}`;
}

export function wordsFor(cell, point, about) {
  const kind = kindOf(cell, point);
  if (kind === "apart") return `Set apart: ${cell.why}`;
  if (kind === "refused") return `Not answered for: ${cell.why}`;
  const named = about.positive ?? cell.class;
  const limit = point ? ` (flagged from ${probability(point.probability)})` : "";
  return `${capital(classOf(cell, point, about))}: probability of ${named} ${probability(cell.probability)}${limit}`;
}

export function tally(pictures, point, about) {
  const found = { found: 0, counted: 0, flagged: 0, excluded: {}, classes: {} };
  for (const cell of pictures.flatMap((picture) => picture.cells)) {
    found.found += 1;
    if (!cell.counted) {
      const why = cell.why.split(":")[0];
      found.excluded[why] = (found.excluded[why] ?? 0) + 1;
      continue;
    }
    found.counted += 1;
    if (kindOf(cell, point) === "flagged") found.flagged += 1;
    const name = classOf(cell, point, about);
    found.classes[name] = (found.classes[name] ?? 0) + 1;
  }
  found.excluded = Object.fromEntries(Object.entries(found.excluded).sort((a, b) => b[1] - a[1]));
  return found;
}
