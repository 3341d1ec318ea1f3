// Pointer, touch and key controls of the viewer.

import { cellState } from "./cells.js";
import { boxCenter } from "./viewer.js";

export const ZOOM_STEP = 1.4;
const MIN_DRAG_PX = 5; // shorter movements are clicks

export function addControls(viewer) {
  const { canvas } = viewer;
  const toImage = (event) => viewer.toImage(event.offsetX, event.offsetY);
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.offsetX, y: event.offsetY, from: [viewer.x, viewer.y], hasMoved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!viewer.field) return;
    if (!drag) return viewer.hover(viewer.findCell(...toImage(event)));
    const [dx, dy] = [event.offsetX - drag.x, event.offsetY - drag.y];
    drag.hasMoved ||= Math.hypot(dx, dy) > MIN_DRAG_PX;
    if (drag.hasMoved) viewer.move(drag.from[0] - dx / viewer.scale, drag.from[1] - dy / viewer.scale);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.hasMoved && viewer.field) viewer.select(viewer.findCell(...toImage(event)));
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => (drag = null));
  canvas.addEventListener("pointerleave", () => viewer.hover(null));
  canvas.addEventListener("dblclick", (event) => viewer.zoom(ZOOM_STEP * ZOOM_STEP, toImage(event)));
  const wheel = (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // let the page scroll
    event.preventDefault();
    viewer.zoom(event.deltaY < 0 ? ZOOM_STEP : 1 / ZOOM_STEP, toImage(event));
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
  ArrowLeft: (viewer) => selectTowards(viewer, -1, 0),
  ArrowRight: (viewer) => selectTowards(viewer, 1, 0),
  ArrowUp: (viewer) => selectTowards(viewer, 0, -1),
  ArrowDown: (viewer) => selectTowards(viewer, 0, 1),
  n: (viewer) => selectFlagged(viewer, 1),
  p: (viewer) => selectFlagged(viewer, -1),
  "+": (viewer) => viewer.zoom(ZOOM_STEP),
  "=": (viewer) => viewer.zoom(ZOOM_STEP),
  "-": (viewer) => viewer.zoom(1 / ZOOM_STEP),
  0: (viewer) => viewer.fit(),
  Escape: (viewer) => viewer.select(null),
};

/** Selects the nearest cell in a direction: farther along it than across it. */
function selectTowards(viewer, dx, dy) {
  const visible = viewer.visibleCells();
  if (viewer.selected === null) return visible.length ? viewer.goTo(visible[0]) : undefined;
  const [x, y] = boxCenter(viewer.cells[viewer.selected].box);
  const distance = (index) => {
    const [cx, cy] = boxCenter(viewer.cells[index].box);
    const [along, across] = dx ? [(cx - x) * dx, Math.abs(cy - y)] : [(cy - y) * dy, Math.abs(cx - x)];
    return along > 0 && along >= across ? along + 2 * across : Infinity;
  };
  const best = visible.filter((index) => distance(index) < Infinity).sort((a, b) => distance(a) - distance(b))[0];
  if (best !== undefined) viewer.goTo(best);
}

function selectFlagged(viewer, direction) {
  const flagged = [...viewer.cells.keys()].filter((index) => cellState(viewer.cells[index], viewer.point) === "flagged");
  if (!flagged.length) return;
  const current = flagged.indexOf(viewer.selected);
  viewer.goTo(flagged[current < 0 ? 0 : (current + direction + flagged.length) % flagged.length]);
}
