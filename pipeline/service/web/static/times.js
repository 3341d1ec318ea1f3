// Times in the reader's locale that stay true while the page is open.

import { h } from "./dom.js";
import { NOTHING, ago, duration, elapsed, moment } from "./words.js";

/** "3 minutes ago", with the exact moment on hover. */
export function since(iso) {
  return iso ? h("time", { datetime: iso, title: moment(iso), "data-says": "ago" }, ago(iso)) : NOTHING;
}

const lasting = (iso) => duration(Math.max(0, Math.round(elapsed(iso)))).replace(/\.0 s$/, " s");

/** "1 min 12 s", growing. */
export function running(iso) {
  return iso
    ? h("time", { datetime: iso, title: `since ${moment(iso)}`, "data-says": "running" }, lasting(iso))
    : NOTHING;
}

export const at = (iso) => (iso ? h("time", { datetime: iso }, moment(iso)) : NOTHING);

const SAYS = { ago, running: lasting };

function tick() {
  if (document.hidden) return;
  for (const node of document.querySelectorAll("time[data-says]")) {
    const text = SAYS[node.dataset.says](node.dateTime);
    if (node.textContent !== text) node.textContent = text;
  }
}

export const startClock = () => setInterval(tick, 1000);
