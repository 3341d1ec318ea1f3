// Users: adding one, with a token that is shown once, and revoking one.

import { encodeSegment, get, post } from "./api.js";
import { confirmAction, showSecret } from "./dialogs.js";
import { badge, emptyState, h, panel, renderIfChanged, table } from "./dom.js";
import { NAME_PATTERN, form, inputField, runWithButton, selectField } from "./forms.js";
import { dateTime } from "./times.js";

const ROLES = [
  ["viewer", "viewer: sees runs, sites and approvals"],
  ["officer", "officer: also reads the log"],
  ["lead", "lead: also controls runs, sites and users"],
];

export async function usersPage(currentUser) {
  const list = panel("users", "Users who can sign in", { wide: true });
  const add = panel("add", "Add a user");
  const error = h("p", { class: "error", role: "alert" });
  let users = await get("/api/users");

  const reload = async () => {
    users = await get("/api/users");
    draw();
  };
  const revoke = async (user, button) => {
    const isConfirmed = await confirmAction(
      `Revoke ${user.name}'s token?`,
      "The user is signed out at once. The token cannot be restored; add the user again for a new one.",
      "Revoke",
    );
    if (isConfirmed)
      await runWithButton(button, error, async () => {
        await post(`/api/users/${encodeSegment(user.name)}/revoke`);
        await reload();
      });
  };
  const revokeButton = (user) =>
    h(
      "button",
      {
        type: "button",
        id: `revoke-${user.name}`,
        "aria-label": `Revoke ${user.name}`,
        onclick: (event) => revoke(user, event.currentTarget),
      },
      "Revoke",
    );
  const userRow = (user) => [
    [user.name, user.name === currentUser.name && h("small", null, "this is you")],
    user.role,
    dateTime(user.created),
    user.revoked ? badge("quiet", "revoked") : revokeButton(user),
  ];
  const columns = [{ title: "Name" }, { title: "Role" }, { title: "Added" }, { title: "Token" }];
  const draw = () =>
    renderIfChanged(list.body, users, () =>
      users.length
        ? table("Users who can sign in", columns, users.map(userRow), { hideCaption: true })
        : emptyState("No users yet.", "Add the first one below."),
    );

  const send = async (values, node) => {
    const name = values.get("name").trim();
    const { token } = await post("/api/users", { name, role: values.get("role") });
    node.reset();
    await reload();
    await showSecret(`Token for ${name}`, token, [
      `Give it to ${name} over a secure channel, for signing in at ${location.origin}.`,
    ]);
  };
  add.body.append(
    form(
      { id: "add-form", class: "row" },
      "Add",
      send,
      inputField("name", "Name", { required: true, pattern: NAME_PATTERN, maxlength: "48" }, "Letters, digits, - and _"),
      selectField("role", "Role", ROLES, "viewer"),
    ),
  );
  draw();
  return {
    title: "Users",
    nodes: [h("div", { class: "head" }, h("h1", null, "Users")), error, list.section, add.section],
  };
}
