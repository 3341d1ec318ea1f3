// The list of images, with counts, progress and errors.

import { countFlagged } from "./cells.js";
import { byId, formatCount, h } from "./dom.js";

export function showList(fields, shown, point, model, actions) {
  const focusedId = document.activeElement?.closest?.("#list") ? document.activeElement.id : "";
  byId("list").replaceChildren(...fields.map((field) => listItem(field, field === shown, point, model, actions)));
  if (focusedId) byId(focusedId)?.focus({ preventScroll: true });
  const numPending = fields.filter((field) => field.state === "waiting" || field.state === "reading").length;
  const numFailed = fields.filter((field) => field.state === "failed").length;
  const numDone = fields.length - numPending;
  const text = numPending ? `reading ${numDone + 1} of ${fields.length}` : `${fields.length - numFailed} read${numFailed ? `, ${numFailed} not` : ""}`;
  byId("progress").textContent = fields.length ? text : "";
}

function listItem(field, isCurrent, point, model, actions) {
  const remove = h(
    "button",
    { type: "button", class: "remove", id: `remove-${field.id}`, "aria-label": `Remove ${field.name}`, title: "Remove", onclick: () => actions.remove(field) },
    "×",
  );
  const name = h("span", { class: "name", title: field.name }, field.name);
  if (field.state === "done") {
    const open = h(
      "button",
      { type: "button", class: "pick", id: `open-${field.id}`, "aria-current": isCurrent ? "true" : null, onclick: () => actions.open(field) },
      field.thumbnail,
      h("span", null, name, countsOf(field, point, model)),
    );
    return h("li", { class: "done" }, open, remove);
  }
  if (field.state === "failed") {
    const retry = field.canRetry ? h("button", { type: "button", id: `retry-${field.id}`, onclick: () => actions.retry(field) }, "Try again") : null;
    return h("li", { class: "failed" }, h("div", null, name, h("span", { class: "error" }, `Not read: ${field.error}`), retry), remove);
  }
  const isReading = field.state === "reading";
  const state = isReading ? h("progress", { "aria-label": `Reading ${field.name}` }) : h("span", { class: "counts" }, "waiting");
  return h("li", { class: "busy" }, h("div", null, name, state), remove);
}

function countsOf(field, point, model) {
  if (field.duplicateOf !== null) return h("span", { class: "counts" }, `same image as ${field.duplicateOf}: not counted again`);
  const counted = formatCount(field.image.summary.num_counted);
  const text = model.positive_class === null ? `${counted} counted` : `⚑ ${formatCount(countFlagged(field.image, point))} of ${counted}`;
  return h("span", { class: "counts", title: "flagged of counted" }, text, h("span", { class: "sr" }, " flagged"));
}
