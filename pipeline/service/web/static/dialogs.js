// Dialogs on <dialog>: the browser keeps the focus inside, Escape closes it, and the focus returns to where it was.

import { commandBlock, h } from "./dom.js";

let numDialogs = 0;

/** Resolves to the value of the pressed button. `buttons`: [label, value, class]. */
function openDialog(title, content, buttons, { closable = true } = {}) {
  const id = `dialog-${(numDialogs += 1)}`;
  return new Promise((resolve) => {
    const focused = document.activeElement;
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", { id }, title),
      h("div", null, content),
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
      if (focused?.isConnected) focused.focus();
      resolve(dialog.returnValue);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Whether the user confirmed. Cancel is the first button, so that Enter does no harm. */
export async function confirmAction(title, text, label) {
  const paragraphs = [text].flat().map((line) => h("p", null, line));
  const buttons = [
    ["Cancel", "cancel", null],
    [label, "confirm", "danger"],
  ];
  return (await openDialog(title, paragraphs, buttons)) === "confirm";
}

/** Shows a secret that cannot be shown again; Escape does not close the dialog. `notes`: text, nodes or {command}. */
export function showSecret(title, secret, notes) {
  const copyStatus = h("span", { role: "status", class: "quiet" });
  const input = h("input", {
    id: "secret",
    class: "secret",
    readonly: true,
    value: secret,
    spellcheck: "false",
    autocomplete: "off",
    onfocus: () => input.select(),
  });
  const copy = async () => {
    input.select();
    try {
      await navigator.clipboard.writeText(secret);
      copyStatus.textContent = "Copied.";
    } catch {
      copyStatus.textContent = "Press Ctrl+C to copy.";
    }
  };
  const content = [
    h(
      "p",
      null,
      h("label", { for: "secret" }, "One-time token"),
      h("span", { class: "with-button" }, input, h("button", { type: "button", onclick: copy }, "Copy")),
    ),
    h("p", { class: "quiet" }, "It is shown only now: the coordinator stores a hash of it. ", copyStatus),
    ...notes.map((note) => (note.command ? commandBlock(note.command) : h("p", null, note))),
  ];
  return openDialog(title, content, [["I have saved it", "done", "main"]], { closable: false });
}
