// Times in the reader's locale; relative ones are updated every second while the page is visible.

import { h } from "./dom.js";
import { MISSING, elapsedSeconds, formatDateTime, formatDuration, formatTimeAgo } from "./format.js";

/** "3 minutes ago", with the date and time as tooltip. */
export function timeAgo(iso) {
  return iso
    ? h("time", { datetime: iso, title: formatDateTime(iso), "data-format": "ago" }, formatTimeAgo(iso))
    : MISSING;
}

/** The time since `iso`, such as "1 min 12 s". */
export function elapsedTime(iso) {
  return iso
    ? h("time", { datetime: iso, title: `since ${formatDateTime(iso)}`, "data-format": "elapsed" }, formatElapsed(iso))
    : MISSING;
}

const formatElapsed = (iso) => formatDuration(Math.max(0, Math.round(elapsedSeconds(iso)))).replace(/\.0 s$/, " s");

export const dateTime = (iso) => (iso ? h("time", { datetime: iso }, formatDateTime(iso)) : MISSING);

const FORMATS = { ago: formatTimeAgo, elapsed: formatElapsed };

function updateTimes() {
  if (document.hidden) return;
  for (const node of document.querySelectorAll("time[data-format]")) {
    const text = FORMATS[node.dataset.format](node.dateTime);
    if (node.textContent !== text) node.textContent = text;
  }
}

export const startClock = () => setInterval(updateTimes, 1000);
