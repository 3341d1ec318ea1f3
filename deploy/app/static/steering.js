// Pointer, touch and keys on the picture.

import { kindOf } from "./cells.js";
import { middle } from "./viewer.js";

export const STEP = 1.4;
const SLACK = 5; // a hand that trembles does not drag

export function steer(viewer) {
  const { canvas } = viewer;
  const place = (event) => viewer.inPicture(event.offsetX, event.offsetY);
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.offsetX, y: event.offsetY, from: [viewer.x, viewer.y], moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!viewer.field) return;
    if (!held) return viewer.hover(viewer.find(...place(event)));
    const [dx, dy] = [event.offsetX - held.x, event.offsetY - held.y];
    held.moved ||= Math.hypot(dx, dy) > SLACK;
    if (held.moved) viewer.move(held.from[0] - dx / viewer.scale, held.from[1] - dy / viewer.scale);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (held && !held.moved && viewer.field) viewer.choose(viewer.find(...place(event)));
    held = null;
  });
  canvas.addEventListener("pointercancel", () => (held = null));
  canvas.addEventListener("pointerleave", () => viewer.hover(null));
  canvas.addEventListener("dblclick", (event) => viewer.zoom(STEP * STEP, place(event)));
  const wheel = (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // else the page scrolls
    event.preventDefault();
    viewer.zoom(event.deltaY < 0 ? STEP : 1 / STEP, place(event));
  };
  canvas.addEventListener("wheel", wheel, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    if (!KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey || !viewer.field) return;
    event.preventDefault();
    viewer.hover(null);
    KEYS[event.key](viewer);
  });
}

const KEYS = {
  ArrowLeft: (viewer) => step(viewer, -1, 0),
  ArrowRight: (viewer) => step(viewer, 1, 0),
  ArrowUp: (viewer) => step(viewer, 0, -1),
  ArrowDown: (viewer) => step(viewer, 0, 1),
  n: (viewer) => next(viewer, 1),
  p: (viewer) => next(viewer, -1),
  "+": (viewer) => viewer.zoom(STEP),
  "=": (viewer) => viewer.zoom(STEP),
  "-": (viewer) => viewer.zoom(1 / STEP),
  0: (viewer) => viewer.fit(),
  Escape: (viewer) => viewer.choose(null),
};

/** To the nearest cell that lies more that way than aside. */
function step(viewer, dx, dy) {
  const shown = viewer.shown();
  if (viewer.chosen === null) return shown.length ? viewer.goTo(shown[0]) : undefined;
  const [x, y] = middle(viewer.cells[viewer.chosen].box);
  const far = (place) => {
    const [cx, cy] = middle(viewer.cells[place].box);
    const [along, aside] = dx ? [(cx - x) * dx, Math.abs(cy - y)] : [(cy - y) * dy, Math.abs(cx - x)];
    return along > 0 && along >= aside ? along + 2 * aside : Infinity;
  };
  const best = shown.filter((place) => far(place) < Infinity).sort((a, b) => far(a) - far(b))[0];
  if (best !== undefined) viewer.goTo(best);
}

function next(viewer, way) {
  const flagged = [...viewer.cells.keys()].filter((place) => kindOf(viewer.cells[place], viewer.point) === "flagged");
  if (!flagged.length) return;
  const now = flagged.indexOf(viewer.chosen);
  viewer.goTo(flagged[now < 0 ? 0 : (now + way + flagged.length) % flagged.length]);
}
