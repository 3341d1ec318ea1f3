// The hospitals: their health, inviting one, removing one.

import { get, part, post } from "./api.js";
import { empty, h, panel, show, table } from "./dom.js";
import { confirmed, showOnce } from "./dialogs.js";
import { NAME, busy, field, form } from "./forms.js";
import { SITE_COLUMNS, siteRows, steady } from "./site_rows.js";
import { listen } from "./stream.js";
import { at } from "./times.js";

export async function sitesPage(me) {
  const lead = me.role === "lead";
  const list = panel("enrolled", "Enrolled sites", { wide: true });
  const error = h("p", { class: "error", role: "alert" });
  let sites = await get("/api/sites");

  const remove = async (site, button) => {
    const sure = await confirmed(
      `Remove ${site.site}?`,
      [
        "Its certificate and credential stop working at once, and runs go on without it.",
        "Its ledger and its models stay at the hospital. To come back it needs a new invitation.",
      ],
      "Remove",
    );
    if (sure)
      await busy(button, error, async () => {
        await post(`/api/sites/${part(site.site)}/remove`);
        sites = await get("/api/sites");
        draw();
      });
  };

  const columns = [...SITE_COLUMNS, { title: "Enrolled" }, ...(lead ? [{ title: "Remove" }] : [])];
  const extra = (site) => [
    at(site.enrolled),
    ...(lead
      ? [
          site.left
            ? "–"
            : h(
                "button",
                {
                  type: "button",
                  class: "plain",
                  id: `remove-${site.site}`,
                  "aria-label": `Remove ${site.site}`,
                  onclick: (event) => remove(site, event.currentTarget),
                },
                "Remove",
              ),
        ]
      : []),
  ];
  const draw = () =>
    show(list.body, sites.map(steady), () =>
      sites.length
        ? table("Sites that have joined, with the keys they are known by", columns, siteRows(sites, true, extra))
        : empty("No site has joined yet.", lead ? "Invite the first one below." : "A lead invites them."),
    );

  draw();
  const leave = listen(() => "/api/events", {
    sites: (told) => {
      sites = told;
      draw();
    },
  });
  const head = h("div", { class: "head" }, h("h1", null, "Sites"));
  return { title: "Sites", nodes: [head, error, list.section, lead && inviteSection()].filter(Boolean), leave };
}

function inviteSection() {
  const { section, body } = panel("invite", "Invite a site");
  const send = async (values, node) => {
    const name = values.get("site").trim();
    const { token } = await post(`/api/sites/${part(name)}/invite`, { hours: Number(values.get("hours")) });
    node.reset();
    await showOnce(`Invitation for ${name}`, token, [
      "Give it to the hospital's data engineer by a way you trust. There they type:",
      { command: `hemofed site join HOME --coordinator ${location.origin} --site ${name}` },
      [
        "HOME is the folder that ",
        h("code", null, "hemofed site init"),
        " made. The command asks for the token; it can also be piped in or stand in ",
        h("code", null, "HEMOFED_TOKEN"),
        ".",
      ],
    ]);
  };
  body.append(
    h(
      "p",
      { class: "quiet" },
      "The hospital gets a token that works once. With it, its agent proves its key and is given its certificate.",
    ),
    form(
      { id: "invite-form", class: "row" },
      "Invite",
      send,
      field("site", "Name of the site", { required: true, pattern: NAME, maxlength: "48" }, "Letters, digits, - and _"),
      field("hours", "Valid for, in hours", { type: "number", min: "1", max: "2160", value: "48", required: true }),
    ),
  );
  return section;
}
