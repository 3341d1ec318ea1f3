// Labelled fields, errors beside the form, and buttons that wait for the coordinator's answer.

import { announce, h } from "./dom.js";

export const NAME = "[A-Za-z0-9][A-Za-z0-9_\\-]{0,47}"; // of a site or a user: becomes a path, a certificate

export function field(id, label, attrs = {}, hint = null) {
  const help = hint ? `${id}-hint` : null;
  return h(
    "p",
    { class: "field" },
    h("label", { for: id }, label),
    h("input", { id, name: id, "aria-describedby": help, autocomplete: "off", ...attrs }),
    hint && h("small", { id: help }, hint),
  );
}

export function choice(id, label, options, chosen) {
  return h(
    "p",
    { class: "field" },
    h("label", { for: id }, label),
    h(
      "select",
      { id, name: id },
      options.map(([value, text]) => h("option", { value, selected: value === chosen }, text)),
    ),
  );
}

/** `send` gets the form's values; what it throws is shown with its text. */
export function form(attrs, label, send, ...fields) {
  const error = h("p", { class: "error", role: "alert" });
  const button = h("button", { type: "submit", class: "main" }, label);
  const node = h("form", { ...attrs, novalidate: false }, fields, h("p", { class: "actions" }, button), error);
  node.addEventListener("submit", async (event) => {
    event.preventDefault();
    await busy(button, error, () => send(new FormData(node), node));
  });
  return node;
}

/** Runs `act` with the button off; the error's text goes to `error`. */
export async function busy(button, error, act) {
  if (button.getAttribute("aria-busy") === "true") return;
  button.setAttribute("aria-busy", "true");
  error.replaceChildren();
  try {
    await act();
  } catch (problem) {
    error.append(problem.message);
    announce("");
  } finally {
    button.removeAttribute("aria-busy");
  }
}
