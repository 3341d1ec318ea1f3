// The picture with its cells: drawn as far as it is seen, so that a large field costs no more than a small one.

import { KINDS, kindOf, wordsFor } from "./cells.js";
import { by, count } from "./dom.js";

const ROOM = 24; // screen pixels that a box must have for a label not to hide its neighbours
const LARGEST = 12; // screen pixels a pixel

export class Viewer {
  constructor(about, hidden) {
    this.about = about;
    this.hidden = hidden; // kinds that are not shown
    this.canvas = by("canvas");
    this.point = null;
    this.field = null;
    this.bitmap = null;
    this.chosen = null; // place of a cell
    this.hovered = null;
    new ResizeObserver(() => this.resized()).observe(this.canvas);
  }

  show(field, bitmap, chosen = null) {
    this.bitmap?.close();
    Object.assign(this, { field, bitmap, chosen, hovered: null });
    this.fit();
    if (chosen !== null) this.goTo(chosen);
    this.tell();
  }

  at(point) {
    this.point = point;
    this.draw();
    this.tell();
  }

  get cells() {
    return this.field?.picture.cells ?? [];
  }

  fit() {
    if (!this.field) return;
    const { width, height } = this.field.picture;
    const wide = this.canvas.clientWidth;
    const high = Math.min((wide * height) / width, Math.max(220, window.innerHeight * 0.62));
    this.canvas.style.height = `${Math.round(high)}px`;
    this.smallest = Math.min(wide / width, high / height);
    Object.assign(this, { scale: this.smallest, x: width / 2, y: height / 2 });
    this.draw();
  }

  resized() {
    if (!this.canvas.clientWidth || this.wide === this.canvas.clientWidth) return;
    this.wide = this.canvas.clientWidth;
    this.fit();
  }

  zoom(by, about = null) {
    if (!this.field) return;
    const old = this.scale;
    this.scale = Math.min(LARGEST, Math.max(this.smallest, old * by));
    const [x, y] = about ?? (this.chosen === null ? [this.x, this.y] : middle(this.cells[this.chosen].box));
    this.x = x + ((this.x - x) * old) / this.scale;
    this.y = y + ((this.y - y) * old) / this.scale;
    this.draw();
  }

  move(x, y) {
    Object.assign(this, { x, y });
    this.draw();
  }

  /** A cell is made the middle of the view only if it would lie outside. */
  goTo(place, near = false) {
    this.chosen = place;
    const box = this.cells[place].box;
    if (near) this.scale = Math.max(this.scale, Math.min(LARGEST, 120 / Math.max(box[2] - box[0], box[3] - box[1])));
    const [x, y] = middle(box);
    const [left, top] = this.onScreen(box[0], box[1]);
    const [right, bottom] = this.onScreen(box[2], box[3]);
    const outside = left < 0 || top < 0 || right > this.canvas.clientWidth || bottom > this.canvas.clientHeight;
    if (near || outside) Object.assign(this, { x, y });
    this.draw();
    this.tell();
  }

  onScreen(x, y) {
    const { clientWidth, clientHeight } = this.canvas;
    return [(x - this.x) * this.scale + clientWidth / 2, (y - this.y) * this.scale + clientHeight / 2];
  }

  inPicture(x, y) {
    const { clientWidth, clientHeight } = this.canvas;
    return [(x - clientWidth / 2) / this.scale + this.x, (y - clientHeight / 2) / this.scale + this.y];
  }

  draw() {
    if (!this.bitmap) return;
    const { clientWidth: wide, clientHeight: high } = this.canvas;
    const { width, height } = this.field.picture;
    const room = [wide / this.scale / 2, high / this.scale / 2];
    this.x = room[0] * 2 >= width ? width / 2 : Math.min(width - room[0], Math.max(room[0], this.x));
    this.y = room[1] * 2 >= height ? height / 2 : Math.min(height - room[1], Math.max(room[1], this.y));
    const sharp = window.devicePixelRatio || 1;
    Object.assign(this.canvas, { width: Math.round(wide * sharp), height: Math.round(high * sharp) });
    this.canvas.classList.toggle("moves", this.scale > this.smallest * 1.01);
    const pen = this.canvas.getContext("2d");
    pen.setTransform(sharp, 0, 0, sharp, 0, 0);
    pen.imageSmoothingQuality = "high";
    const [left, top] = this.onScreen(0, 0);
    pen.fillStyle = "#fff"; // transparent pixels are read as white
    pen.fillRect(left, top, width * this.scale, height * this.scale);
    pen.drawImage(this.bitmap, left, top, width * this.scale, height * this.scale);
    this.boxes(pen);
  }

  boxes(pen) {
    const order = Object.keys(KINDS).reverse();
    for (const kind of order)
      if (!this.hidden.has(kind)) this.cells.forEach((cell) => kindOf(cell, this.point) === kind && this.box(pen, cell, kind));
    const marked = this.cells[this.hovered ?? this.chosen];
    if (!marked) return;
    this.mark(pen, marked);
    this.box(pen, marked, kindOf(marked, this.point)); // its label lies on top
  }

  box(pen, cell, kind) {
    const { shade, width, dash } = KINDS[kind];
    const [x, y] = this.onScreen(cell.box[0], cell.box[1]);
    const [right, bottom] = this.onScreen(cell.box[2], cell.box[3]);
    Object.assign(pen, { strokeStyle: shade, lineWidth: width });
    pen.setLineDash(dash);
    pen.strokeRect(x, y, right - x, bottom - y);
    if (kind !== "flagged" || right - x < ROOM) return;
    const words = cell.probability.toFixed(2);
    pen.font = "600 12px system-ui, sans-serif";
    const wide = pen.measureText(words).width + 6;
    const above = y > 17 ? y - 16 : y;
    pen.fillStyle = shade;
    pen.fillRect(x - 1.5, above, wide, 16);
    pen.fillStyle = "#fff";
    pen.fillText(words, x + 1.5, above + 12);
  }

  mark(pen, cell) {
    const [x, y] = this.onScreen(cell.box[0], cell.box[1]);
    const [right, bottom] = this.onScreen(cell.box[2], cell.box[3]);
    pen.setLineDash([]);
    for (const [shade, width] of [["#16212b", 6], ["#ffd84d", 3]]) {
      Object.assign(pen, { strokeStyle: shade, lineWidth: width });
      pen.strokeRect(x - 4, y - 4, right - x + 8, bottom - y + 8);
    }
  }

  tell() {
    const cell = this.cells[this.hovered ?? this.chosen];
    const words = cell ? wordsFor(cell, this.point, this.about) : "Point at a cell, tap it or use the arrow keys to see what it was taken for.";
    if (by("told").textContent !== words) by("told").textContent = words;
    by("told").classList.toggle("quiet", !cell);
    if (!this.field) return;
    const flagged = this.cells.filter((one) => kindOf(one, this.point) === "flagged").length;
    this.canvas.setAttribute("aria-label", `${this.field.name}: ${count(this.cells.length)} cells and other things found, ${flagged} flagged`);
  }

  /** The smallest shown box there. */
  find(x, y) {
    const inside = ({ box: [x0, y0, x1, y1] }) => x >= x0 && x <= x1 && y >= y0 && y <= y1;
    const size = (place) => area(this.cells[place].box);
    const hits = this.shown().filter((place) => inside(this.cells[place]));
    return hits.length ? hits.reduce((a, b) => (size(b) < size(a) ? b : a)) : null;
  }

  shown() {
    return [...this.cells.keys()].filter((place) => !this.hidden.has(kindOf(this.cells[place], this.point)));
  }

  /** Marked, or no longer. */
  choose(place) {
    Object.assign(this, { chosen: place, hovered: null });
    this.draw();
    this.tell();
  }

  hover(place) {
    if (place === this.hovered) return;
    this.hovered = place;
    this.draw();
    this.tell();
  }
}

export const middle = ([x0, y0, x1, y1]) => [(x0 + x1) / 2, (y0 + y1) / 2];
const area = ([x0, y0, x1, y1]) => (x1 - x0) * (y1 - y0);
