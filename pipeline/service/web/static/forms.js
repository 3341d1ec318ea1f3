// Labelled fields, forms that show errors, and buttons that are inactive while a request runs.

import { announce, h } from "./dom.js";

export const NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9_\\-]{0,47}"; // of a site or a user, as the API accepts it

export function inputField(id, label, attrs = {}, hint = null) {
  const hintId = hint ? `${id}-hint` : null;
  return h(
    "p",
    { class: "field" },
    h("label", { for: id }, label),
    h("input", { id, name: id, "aria-describedby": hintId, autocomplete: "off", ...attrs }),
    hint && h("small", { id: hintId }, hint),
  );
}

/** `options`: [value, text]. */
export function selectField(id, label, options, selected) {
  return h(
    "p",
    { class: "field" },
    h("label", { for: id }, label),
    h(
      "select",
      { id, name: id },
      options.map(([value, text]) => h("option", { value, selected: value === selected }, text)),
    ),
  );
}

/** `send(formData, node)` is called on submit; the text of an error that it throws is shown. */
export function form(attrs, label, send, ...fields) {
  const error = h("p", { class: "error", role: "alert" });
  const button = h("button", { type: "submit", class: "main" }, label);
  const node = h("form", { ...attrs, novalidate: false }, fields, h("p", { class: "actions" }, button), error);
  node.addEventListener("submit", async (event) => {
    event.preventDefault();
    await runWithButton(button, error, () => send(new FormData(node), node));
  });
  return node;
}

/** Runs `action` while the button is inactive, and shows the text of an error in `errorNode`. */
export async function runWithButton(button, errorNode, action) {
  if (button.getAttribute("aria-busy") === "true") return;
  button.setAttribute("aria-busy", "true");
  errorNode.replaceChildren();
  try {
    await action();
  } catch (error) {
    errorNode.append(error.message);
    announce("");
  } finally {
    button.removeAttribute("aria-busy");
  }
}
