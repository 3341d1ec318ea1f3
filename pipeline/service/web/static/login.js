// Signing in with a token. The token goes to the coordinator and is kept nowhere here.

import { post } from "./api.js";
import { h } from "./dom.js";
import { field, form } from "./forms.js";

export function loginPage(text, entered) {
  const send = async (values, node) => {
    await post("/api/login", { token: values.get("token").trim() });
    node.reset();
    await entered();
  };
  const nodes = [
    h(
      "div",
      { class: "login" },
      h("p", { class: "brand" }, h("img", { src: "/static/icon.svg", alt: "", width: "28", height: "28" }), "hemofed"),
      h("h1", null, "Sign in"),
      text && h("p", { class: "notice" }, text),
      form(
        { id: "login" },
        "Sign in",
        send,
        field(
          "token",
          "Token",
          { type: "password", required: true, autocomplete: "current-password", spellcheck: "false" },
          "As the study lead gave it to you. The first lead's is in the file lead.token of the coordinator's home.",
        ),
      ),
      h(
        "p",
        { class: "quiet" },
        "Images never leave the hospitals; this page shows counts, scores and who approved what.",
      ),
    ),
  ];
  return { title: "Sign in", nodes };
}
