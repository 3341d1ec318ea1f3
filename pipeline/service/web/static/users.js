// Who may sign in: adding somebody, with a token that is shown once, and revoking.

import { get, part, post } from "./api.js";
import { badge, empty, h, panel, show, table } from "./dom.js";
import { confirmed, showOnce } from "./dialogs.js";
import { NAME, busy, choice, field, form } from "./forms.js";
import { at } from "./times.js";

const ROLES = [
  ["viewer", "viewer: looks"],
  ["officer", "officer: looks, and reads the log"],
  ["lead", "lead: offers, pauses and stops studies, invites, adds users"],
];

export async function usersPage(me) {
  const list = panel("people", "Who may sign in", { wide: true });
  const add = panel("add", "Add a user");
  const error = h("p", { class: "error", role: "alert" });
  let users = await get("/api/users");

  const refresh = async () => {
    users = await get("/api/users");
    draw();
  };
  const revoke = async (user, button) => {
    const sure = await confirmed(
      `Revoke ${user.name}'s token?`,
      "Whoever uses it is signed out at once. It cannot be given back; add the user again for a new one.",
      "Revoke",
    );
    if (sure)
      await busy(button, error, async () => {
        await post(`/api/users/${part(user.name)}/revoke`);
        await refresh();
      });
  };
  const row = (user) => [
    [user.name, user.name === me.name && h("small", null, "this is you")],
    user.role,
    at(user.created),
    user.revoked
      ? badge("quiet", "revoked")
      : h(
          "button",
          {
            type: "button",
            class: "plain",
            id: `revoke-${user.name}`,
            "aria-label": `Revoke ${user.name}`,
            onclick: (event) => revoke(user, event.currentTarget),
          },
          "Revoke",
        ),
  ];
  const columns = [{ title: "Name" }, { title: "Role" }, { title: "Added" }, { title: "Token" }];
  const draw = () =>
    show(list.body, users, () =>
      users.length
        ? table("People who may sign in", columns, users.map(row), { hideCaption: true })
        : empty("Nobody yet.", "Add the first below."),
    );

  const send = async (values, node) => {
    const name = values.get("name").trim();
    const { token } = await post("/api/users", { name, role: values.get("role") });
    node.reset();
    await refresh();
    await showOnce(`Token for ${name}`, token, [
      `Give it to ${name} by a way you trust; they sign in with it at ${location.origin}.`,
    ]);
  };
  add.body.append(
    form(
      { id: "add-form", class: "row" },
      "Add",
      send,
      field("name", "Name", { required: true, pattern: NAME, maxlength: "48" }, "Letters, digits, - and _"),
      choice("role", "Role", ROLES, "viewer"),
    ),
  );
  draw();
  return {
    title: "Users",
    nodes: [h("div", { class: "head" }, h("h1", null, "Users")), error, list.section, add.section],
  };
}
