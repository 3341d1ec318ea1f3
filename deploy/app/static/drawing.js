// Small pictures of a field that stay when its pixels go: a thumbnail, and tiles of its most suspicious cells.

const THUMB = { width: 96, height: 72 };
const TILE = 96;
export const MOST = 24;

function canvas(width, height) {
  const made = document.createElement("canvas");
  Object.assign(made, { width, height });
  const pen = made.getContext("2d");
  pen.fillStyle = "#e6e6e6";
  pen.fillRect(0, 0, width, height);
  pen.imageSmoothingQuality = "high";
  return [made, pen];
}

export function thumbOf(bitmap) {
  const scale = Math.max(THUMB.width / bitmap.width, THUMB.height / bitmap.height);
  const [made, pen] = canvas(THUMB.width, THUMB.height);
  const [width, height] = [bitmap.width * scale, bitmap.height * scale];
  pen.drawImage(bitmap, (THUMB.width - width) / 2, (THUMB.height - height) / 2, width, height);
  return made;
}

/** A square about a box, half as large again. */
export function tileOf(bitmap, [x0, y0, x1, y1]) {
  const side = 1.5 * Math.max(x1 - x0, y1 - y0, 4);
  const scale = TILE / side;
  const [made, pen] = canvas(TILE, TILE);
  pen.setTransform(scale, 0, 0, scale, (side / 2 - (x0 + x1) / 2) * scale, (side / 2 - (y0 + y1) / 2) * scale);
  pen.drawImage(bitmap, 0, 0);
  return made;
}

/** More than a montage shows are never needed of one field. */
export function tilesOf(bitmap, cells) {
  return cells
    .map((cell, place) => ({ place, score: cell.log_odds ?? cell.probability, counted: cell.counted, box: cell.box }))
    .filter((cell) => cell.counted)
    .sort((a, b) => b.score - a.score)
    .slice(0, MOST)
    .map(({ place, score, box }) => ({ place, score, canvas: tileOf(bitmap, box) }));
}
