// The list of pictures, with counts, progress and errors.

import { tally } from "./cells.js";
import { by, count, h } from "./dom.js";

export function showList(fields, shown, point, about, acts) {
  const held = document.activeElement?.closest?.("#list") ? document.activeElement.id : "";
  by("list").replaceChildren(...fields.map((field) => row(field, field === shown, point, about, acts)));
  if (held) by(held)?.focus({ preventScroll: true });
  const left = fields.filter((field) => field.state === "waiting" || field.state === "reading").length;
  const bad = fields.filter((field) => field.state === "failed").length;
  const done = fields.length - left;
  const words = left ? `reading ${done + 1} of ${fields.length}` : `${fields.length - bad} read${bad ? `, ${bad} not` : ""}`;
  by("progress").textContent = fields.length ? words : "";
}

function row(field, current, point, about, acts) {
  const remove = h(
    "button",
    { type: "button", class: "remove", id: `remove-${field.id}`, "aria-label": `Remove ${field.name}`, title: "Remove", onclick: () => acts.remove(field) },
    "×",
  );
  const name = h("span", { class: "name", title: field.name }, field.name);
  if (field.state === "done") {
    const { counted, flagged } = tally([field.picture], point, about);
    const words = about.positive === null ? `${count(counted)} counted` : `⚑ ${count(flagged)} of ${count(counted)}`;
    const open = h(
      "button",
      { type: "button", class: "pick", id: `open-${field.id}`, "aria-current": current ? "true" : null, onclick: () => acts.open(field) },
      field.thumb,
      h("span", null, name, h("span", { class: "counts", title: "flagged of counted" }, words, h("span", { class: "sr" }, " flagged"))),
    );
    return h("li", { class: "done" }, open, remove);
  }
  if (field.state === "failed") {
    const again = field.again ? h("button", { type: "button", id: `again-${field.id}`, onclick: () => acts.again(field) }, "Try again") : null;
    return h("li", { class: "failed" }, h("div", null, name, h("span", { class: "error" }, `Not read: ${field.error}`), again), remove);
  }
  const reading = field.state === "reading";
  const state = reading ? h("progress", { "aria-label": `Reading ${field.name}` }) : h("span", { class: "counts" }, "waiting");
  return h("li", { class: "busy" }, h("div", null, name, state), remove);
}
