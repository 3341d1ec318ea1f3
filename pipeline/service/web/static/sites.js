// Enrolled sites: their status, inviting one, removing one.

import { encodeSegment, get, post } from "./api.js";
import { confirmAction, showSecret } from "./dialogs.js";
import { emptyState, h, panel, renderIfChanged, table } from "./dom.js";
import { NAME_PATTERN, form, inputField, runWithButton } from "./forms.js";
import { SITE_COLUMNS, siteRows, withoutHeartbeat } from "./site_rows.js";
import { listen } from "./stream.js";
import { dateTime } from "./times.js";

export async function sitesPage(user) {
  const isLead = user.role === "lead";
  const list = panel("enrolled", "Enrolled sites", { wide: true });
  const error = h("p", { class: "error", role: "alert" });
  let sites = await get("/api/sites");

  const remove = async (site, button) => {
    const isConfirmed = await confirmAction(
      `Remove ${site.site}?`,
      [
        "Its certificate and credential stop working at once, and runs continue without it.",
        "Its ledger and its models stay at the hospital. To return, it needs a new invitation.",
      ],
      "Remove",
    );
    if (isConfirmed)
      await runWithButton(button, error, async () => {
        await post(`/api/sites/${encodeSegment(site.site)}/remove`);
        sites = await get("/api/sites");
        draw();
      });
  };
  const removeButton = (site) =>
    h(
      "button",
      {
        type: "button",
        id: `remove-${site.site}`,
        "aria-label": `Remove ${site.site}`,
        onclick: (event) => remove(site, event.currentTarget),
      },
      "Remove",
    );
  const columns = [...SITE_COLUMNS, { title: "Enrolled" }, ...(isLead ? [{ title: "Remove" }] : [])];
  const extraCells = (site) => [
    dateTime(site.enrolled),
    ...(isLead ? [site.left ? "–" : removeButton(site)] : []),
  ];
  const draw = () =>
    renderIfChanged(list.body, sites.map(withoutHeartbeat), () =>
      sites.length
        ? table("Enrolled sites and their keys", columns, siteRows(sites, { showKeys: true, extraCells }))
        : emptyState("No site is enrolled yet.", isLead ? "Invite the first one below." : "A lead invites them."),
    );

  draw();
  const leave = listen(() => "/api/events", {
    sites: (newSites) => {
      sites = newSites;
      draw();
    },
  });
  const head = h("div", { class: "head" }, h("h1", null, "Sites"));
  return { title: "Sites", nodes: [head, error, list.section, isLead && inviteSection()].filter(Boolean), leave };
}

function inviteSection() {
  const { section, body } = panel("invite", "Invite a site");
  const send = async (values, node) => {
    const name = values.get("site").trim();
    const { token } = await post(`/api/sites/${encodeSegment(name)}/invite`, { hours: Number(values.get("hours")) });
    node.reset();
    await showSecret(`Invitation for ${name}`, token, [
      "Give it to the hospital's data engineer over a secure channel. The engineer types:",
      { command: `hemofed site join HOME --coordinator ${location.origin} --site ${name}` },
      [
        "HOME is the folder that ",
        h("code", null, "hemofed site init"),
        " created. The command asks for the token, or reads it from standard input or from ",
        h("code", null, "HEMOFED_TOKEN"),
        ".",
      ],
    ]);
  };
  body.append(
    h(
      "p",
      { class: "quiet" },
      "The hospital gets a one-time token. With it, its agent proves that it holds its key and gets a certificate.",
    ),
    form(
      { id: "invite-form", class: "row" },
      "Invite",
      send,
      inputField(
        "site",
        "Name of the site",
        { required: true, pattern: NAME_PATTERN, maxlength: "48" },
        "Letters, digits, - and _",
      ),
      inputField("hours", "Valid for, in hours", {
        type: "number",
        min: "1",
        max: "2160",
        value: "48",
        required: true,
      }),
    ),
  );
  return section;
}
