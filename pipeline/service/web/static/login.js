// Signing in with a token. The token is sent to the coordinator and not stored in the browser.

import { post } from "./api.js";
import { h } from "./dom.js";
import { form, inputField } from "./forms.js";

/** `notice`: why the user has to sign in, or "". `onSignedIn` is called after a successful login. */
export function loginPage(notice, onSignedIn) {
  const send = async (values, node) => {
    await post("/api/login", { token: values.get("token").trim() });
    node.reset();
    await onSignedIn();
  };
  const tokenField = inputField(
    "token",
    "Token",
    { type: "password", required: true, autocomplete: "current-password", spellcheck: "false" },
    "The study lead gives it to you. The first lead's token is in the file lead.token of the coordinator's home.",
  );
  const nodes = [
    h(
      "div",
      { class: "login" },
      h("p", { class: "brand" }, h("img", { src: "/static/icon.svg", alt: "", width: "28", height: "28" }), "hemofed"),
      h("h1", null, "Sign in"),
      notice && h("p", { class: "notice" }, notice),
      form({ id: "login" }, "Sign in", send, tokenField),
      h(
        "p",
        { class: "quiet" },
        "Images never leave the hospitals; this page shows counts, scores and which sites approved which study.",
      ),
    ),
  ];
  return { title: "Sign in", nodes };
}
