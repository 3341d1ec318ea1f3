// Small images of a field that remain when its pixels are released: a thumbnail, and tiles of its most suspicious cells.

const THUMBNAIL = { width: 96, height: 72 };
const TILE = 96;
export const MAX_TILES = 24;

function createCanvas(width, height) {
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d");
  context.fillStyle = "#e6e6e6";
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  return [canvas, context];
}

export function drawThumbnail(bitmap) {
  const scale = Math.max(THUMBNAIL.width / bitmap.width, THUMBNAIL.height / bitmap.height);
  const [canvas, context] = createCanvas(THUMBNAIL.width, THUMBNAIL.height);
  const [width, height] = [bitmap.width * scale, bitmap.height * scale];
  context.drawImage(bitmap, (THUMBNAIL.width - width) / 2, (THUMBNAIL.height - height) / 2, width, height);
  return canvas;
}

/** A square tile around a box, 1.5 times its longer side. */
export function drawTile(bitmap, [x0, y0, x1, y1]) {
  const side = 1.5 * Math.max(x1 - x0, y1 - y0, 4);
  const scale = TILE / side;
  const [canvas, context] = createCanvas(TILE, TILE);
  context.setTransform(scale, 0, 0, scale, (side / 2 - (x0 + x1) / 2) * scale, (side / 2 - (y0 + y1) / 2) * scale);
  context.drawImage(bitmap, 0, 0);
  return canvas;
}

/** Tiles of one field: at most as many as the montage shows. */
export function drawTiles(bitmap, cells) {
  return cells
    .map((cell, index) => ({ index, score: cell.log_odds ?? cell.probability, isCounted: cell.is_counted, box: cell.box }))
    .filter((cell) => cell.isCounted)
    .sort((a, b) => b.score - a.score)
    .slice(0, MAX_TILES)
    .map(({ index, score, box }) => ({ index, score, canvas: drawTile(bitmap, box) }));
}
