// Dialogs on <dialog>: the browser keeps the focus inside, Escape closes, and the focus goes back where it was.

import { command, h } from "./dom.js";

let count = 0;

function open(title, body, buttons, { closable = true } = {}) {
  const id = `dialog-${(count += 1)}`;
  return new Promise((resolve) => {
    const before = document.activeElement;
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", { id }, title),
      h("div", { class: "said" }, body),
      h(
        "p",
        { class: "actions" },
        buttons.map(([label, value, kind]) => h("button", { type: "submit", value, class: kind }, label)),
      ),
    );
    const dialog = h("dialog", { "aria-labelledby": id }, form);
    if (!closable) dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (before?.isConnected) before.focus();
      resolve(dialog.returnValue);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Whether they said yes. The way out comes first, so that Enter does no harm. */
export async function confirmed(title, words, yes) {
  return (
    (await open(
      title,
      [words].flat().map((line) => h("p", null, line)),
      [
        ["Cancel", "no", "plain"],
        [yes, "yes", "danger"],
      ],
    )) === "yes"
  );
}

/** A secret that is shown once: Escape does not lose it. */
export function showOnce(title, secret, notes) {
  const copied = h("span", { role: "status", class: "quiet" });
  const field = h("input", {
    id: "secret",
    class: "secret",
    readonly: true,
    value: secret,
    spellcheck: "false",
    autocomplete: "off",
    onfocus: () => field.select(),
  });
  const copy = async () => {
    field.select();
    try {
      await navigator.clipboard.writeText(secret);
      copied.textContent = "Copied.";
    } catch {
      copied.textContent = "Press Ctrl+C to copy.";
    }
  };
  const body = [
    h(
      "p",
      null,
      h("label", { for: "secret" }, "One-time token"),
      h("span", { class: "with-button" }, field, h("button", { type: "button", onclick: copy }, "Copy")),
    ),
    h("p", { class: "quiet" }, "It is shown only now: the coordinator keeps a hash of it. ", copied),
    ...notes.map((note) => (note.command ? command(note.command) : h("p", null, note))),
  ];
  return open(title, body, [["I have kept it", "done", "main"]], { closable: false });
}
