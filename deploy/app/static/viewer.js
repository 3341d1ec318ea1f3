// The viewer draws an image with its cells; it draws only the visible part, so that large fields cost no more than small ones.

import { CELL_STATES, cellState, describeCell } from "./cells.js";
import { byId, formatCount } from "./dom.js";

const MIN_LABEL_BOX_PX = 24; // in narrower boxes on the screen a label would hide the neighbors
const MAX_SCALE = 12; // screen pixels per image pixel

export class Viewer {
  constructor(model, hiddenStates) {
    this.model = model;
    this.hiddenStates = hiddenStates; // cell states that are not drawn
    this.canvas = byId("canvas");
    this.point = null;
    this.field = null;
    this.bitmap = null;
    this.selected = null; // index of a cell
    this.hovered = null;
    new ResizeObserver(() => this.onResize()).observe(this.canvas);
  }

  show(field, bitmap) {
    this.bitmap?.close();
    Object.assign(this, { field, bitmap, selected: null, hovered: null });
    this.fit();
    this.describe();
  }

  setPoint(point) {
    this.point = point;
    this.draw();
    this.describe();
  }

  get cells() {
    return this.field?.image.cells ?? [];
  }

  fit() {
    if (!this.field) return;
    const { width, height } = this.field.image;
    const canvasWidth = this.canvas.clientWidth;
    const canvasHeight = Math.min((canvasWidth * height) / width, Math.max(220, window.innerHeight * 0.62));
    this.canvas.style.height = `${Math.round(canvasHeight)}px`;
    this.minScale = Math.min(canvasWidth / width, canvasHeight / height);
    Object.assign(this, { scale: this.minScale, x: width / 2, y: height / 2 });
    this.draw();
  }

  onResize() {
    if (!this.canvas.clientWidth || this.canvasWidth === this.canvas.clientWidth) return;
    this.canvasWidth = this.canvas.clientWidth;
    this.fit();
  }

  zoom(factor, center = null) {
    if (!this.field) return;
    const oldScale = this.scale;
    this.scale = Math.min(MAX_SCALE, Math.max(this.minScale, oldScale * factor));
    const [x, y] = center ?? (this.selected === null ? [this.x, this.y] : boxCenter(this.cells[this.selected].box));
    this.x = x + ((this.x - x) * oldScale) / this.scale;
    this.y = y + ((this.y - y) * oldScale) / this.scale;
    this.draw();
  }

  move(x, y) {
    Object.assign(this, { x, y });
    this.draw();
  }

  /** Selects a cell; centers the view on it only if it is outside, or with `zoomIn`. */
  goTo(index, zoomIn = false) {
    this.selected = index;
    const box = this.cells[index].box;
    if (zoomIn) this.scale = Math.max(this.scale, Math.min(MAX_SCALE, 120 / Math.max(box[2] - box[0], box[3] - box[1])));
    const [x, y] = boxCenter(box);
    const [left, top] = this.toScreen(box[0], box[1]);
    const [right, bottom] = this.toScreen(box[2], box[3]);
    const isOutside = left < 0 || top < 0 || right > this.canvas.clientWidth || bottom > this.canvas.clientHeight;
    if (zoomIn || isOutside) Object.assign(this, { x, y });
    this.draw();
    this.describe();
  }

  toScreen(x, y) {
    const { clientWidth, clientHeight } = this.canvas;
    return [(x - this.x) * this.scale + clientWidth / 2, (y - this.y) * this.scale + clientHeight / 2];
  }

  toImage(x, y) {
    const { clientWidth, clientHeight } = this.canvas;
    return [(x - clientWidth / 2) / this.scale + this.x, (y - clientHeight / 2) / this.scale + this.y];
  }

  draw() {
    if (!this.bitmap) return;
    const { clientWidth, clientHeight } = this.canvas;
    const { width, height } = this.field.image;
    const [halfWidth, halfHeight] = [clientWidth / this.scale / 2, clientHeight / this.scale / 2];
    this.x = halfWidth * 2 >= width ? width / 2 : Math.min(width - halfWidth, Math.max(halfWidth, this.x));
    this.y = halfHeight * 2 >= height ? height / 2 : Math.min(height - halfHeight, Math.max(halfHeight, this.y));
    const pixelRatio = window.devicePixelRatio || 1;
    Object.assign(this.canvas, { width: Math.round(clientWidth * pixelRatio), height: Math.round(clientHeight * pixelRatio) });
    this.canvas.classList.toggle("moves", this.scale > this.minScale * 1.01);
    const context = this.canvas.getContext("2d");
    context.setTransform(pixelRatio, 0, 0, pixelRatio, 0, 0);
    context.imageSmoothingQuality = "high";
    const [left, top] = this.toScreen(0, 0);
    context.fillStyle = "#fff"; // transparent pixels are read as white
    context.fillRect(left, top, width * this.scale, height * this.scale);
    context.drawImage(this.bitmap, left, top, width * this.scale, height * this.scale);
    this.drawBoxes(context);
  }

  drawBoxes(context) {
    const order = Object.keys(CELL_STATES).reverse();
    for (const state of order)
      if (!this.hiddenStates.has(state)) this.cells.forEach((cell) => cellState(cell, this.point) === state && this.drawBox(context, cell, state));
    const cell = this.cells[this.hovered ?? this.selected];
    if (!cell) return;
    this.drawHighlight(context, cell);
    this.drawBox(context, cell, cellState(cell, this.point)); // again, so that its label is on top
  }

  drawBox(context, cell, state) {
    const { color, width, dash } = CELL_STATES[state];
    const [x, y] = this.toScreen(cell.box[0], cell.box[1]);
    const [right, bottom] = this.toScreen(cell.box[2], cell.box[3]);
    Object.assign(context, { strokeStyle: color, lineWidth: width });
    context.setLineDash(dash);
    context.strokeRect(x, y, right - x, bottom - y);
    if (state !== "flagged" || right - x < MIN_LABEL_BOX_PX) return;
    const label = cell.probability.toFixed(2);
    context.font = "600 12px system-ui, sans-serif";
    const labelWidth = context.measureText(label).width + 6;
    const labelTop = y > 17 ? y - 16 : y;
    context.fillStyle = color;
    context.fillRect(x - 1.5, labelTop, labelWidth, 16);
    context.fillStyle = "#fff";
    context.fillText(label, x + 1.5, labelTop + 12);
  }

  drawHighlight(context, cell) {
    const [x, y] = this.toScreen(cell.box[0], cell.box[1]);
    const [right, bottom] = this.toScreen(cell.box[2], cell.box[3]);
    context.setLineDash([]);
    for (const [color, width] of [["#16212b", 6], ["#ffd84d", 3]]) {
      Object.assign(context, { strokeStyle: color, lineWidth: width });
      context.strokeRect(x - 4, y - 4, right - x + 8, bottom - y + 8);
    }
  }

  describe() {
    const cell = this.cells[this.hovered ?? this.selected];
    const text = cell ? describeCell(cell, this.point, this.model) : "Point at a cell, tap it or use the arrow keys to see its class.";
    if (byId("cell-info").textContent !== text) byId("cell-info").textContent = text;
    byId("cell-info").classList.toggle("quiet", !cell);
    if (!this.field) return;
    const numFlagged = this.cells.filter((one) => cellState(one, this.point) === "flagged").length;
    this.canvas.setAttribute("aria-label", `${this.field.name}: ${formatCount(this.cells.length)} regions found, ${numFlagged} flagged`);
  }

  /** The smallest visible box at a point of the image. */
  findCell(x, y) {
    const contains = ({ box: [x0, y0, x1, y1] }) => x >= x0 && x <= x1 && y >= y0 && y <= y1;
    const size = (index) => boxArea(this.cells[index].box);
    const hits = this.visibleCells().filter((index) => contains(this.cells[index]));
    return hits.length ? hits.reduce((a, b) => (size(b) < size(a) ? b : a)) : null;
  }

  visibleCells() {
    return [...this.cells.keys()].filter((index) => !this.hiddenStates.has(cellState(this.cells[index], this.point)));
  }

  /** Selects a cell, or none (null). */
  select(index) {
    Object.assign(this, { selected: index, hovered: null });
    this.draw();
    this.describe();
  }

  hover(index) {
    if (index === this.hovered) return;
    this.hovered = index;
    this.draw();
    this.describe();
  }
}

export const boxCenter = ([x0, y0, x1, y1]) => [(x0 + x1) / 2, (y0 + y1) / 2];
const boxArea = ([x0, y0, x1, y1]) => (x1 - x0) * (y1 - y0);
