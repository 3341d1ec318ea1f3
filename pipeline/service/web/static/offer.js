// Offering a study: its TOML text, the sites that are asked, and how many of them have to approve.

import { get, post } from "./api.js";
import { emptyState, h, link, panel } from "./dom.js";
import { form, inputField } from "./forms.js";
import { runHash } from "./run_states.js";
import { connectionBadge } from "./site_rows.js";

export async function offerPage() {
  const sites = (await get("/api/sites")).filter((site) => !site.left);
  const { section, body } = panel("study", "Study", { wide: true });
  body.append(
    sites.length
      ? offerForm(sites)
      : emptyState("No site is enrolled.", link("#/sites", "Invite a hospital first"), "."),
  );
  return {
    title: "Offer a study",
    nodes: [
      h("p", { class: "crumbs" }, link("#/", "Overview")),
      h("div", { class: "head" }, h("h1", null, "Offer a study")),
      section,
    ],
  };
}

function offerForm(sites) {
  const text = h("textarea", {
    id: "toml",
    name: "toml",
    rows: "18",
    required: true,
    spellcheck: "false",
    "aria-describedby": "toml-hint",
  });
  const file = h("input", {
    id: "file",
    type: "file",
    accept: ".toml,text/plain",
    onchange: async () => {
      if (file.files[0]) text.value = await file.files[0].text();
    },
  });
  const send = async (values) => {
    const selected = values.getAll("site");
    if (!selected.length) throw new Error("Select at least one site.");
    const run = await post("/api/runs", {
      study: values.get("toml"),
      sites: selected.length === sites.length ? null : selected,
      min_sites: values.get("min_sites") ? Number(values.get("min_sites")) : null,
    });
    location.hash = runHash(run.id);
  };
  const checkboxes = sites.map((site) =>
    h(
      "p",
      { class: "checkbox" },
      h("input", { type: "checkbox", name: "site", id: `to-${site.site}`, value: site.site, checked: true }),
      h("label", { for: `to-${site.site}` }, site.site),
      connectionBadge(site),
    ),
  );
  const hint = [
    "TOML that ",
    h("code", null, "hemofed study check"),
    " accepts. Nothing is trained before the hospitals' officers have approved.",
  ];
  return form(
    { id: "offer-form" },
    "Offer the study",
    send,
    h("p", { class: "field" }, h("label", { for: "file" }, "Load from a file"), file),
    h("p", { class: "field" }, h("label", { for: "toml" }, "Study file"), text, h("small", { id: "toml-hint" }, hint)),
    h("fieldset", null, h("legend", null, "Offer to"), checkboxes),
    inputField(
      "min_sites",
      "Minimum number of sites",
      { type: "number", min: "1", max: String(sites.length) },
      "The run can start with this many approvals. Default: round.quorum of the study",
    ),
  );
}
