// Offering a study to the hospitals: its text, to whom, and how few suffice.

import { get, post } from "./api.js";
import { empty, h, link, panel } from "./dom.js";
import { field, form } from "./forms.js";
import { connection } from "./site_rows.js";

export async function offerPage() {
  const sites = (await get("/api/sites")).filter((site) => !site.left);
  const { section, body } = panel("study", "The study", { wide: true });
  const text = h("textarea", {
    id: "text",
    name: "text",
    rows: "18",
    required: true,
    spellcheck: "false",
    "aria-describedby": "text-hint",
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
    const chosen = values.getAll("site");
    if (!chosen.length) throw new Error("Choose at least one site.");
    const run = await post("/api/runs", {
      study: values.get("text"),
      sites: chosen.length === sites.length ? null : chosen,
      fewest: values.get("fewest") ? Number(values.get("fewest")) : null,
    });
    location.hash = `#/runs/${encodeURIComponent(run.id)}`;
  };
  const boxes = h(
    "fieldset",
    null,
    h("legend", null, "Offered to"),
    sites.map((site) =>
      h(
        "p",
        { class: "tick" },
        h("input", { type: "checkbox", name: "site", id: `to-${site.site}`, value: site.site, checked: true }),
        h("label", { for: `to-${site.site}` }, site.site),
        connection(site),
      ),
    ),
  );
  if (sites.length) {
    body.append(
      form(
        { id: "offer-form" },
        "Offer it",
        send,
        h("p", { class: "field" }, h("label", { for: "file" }, "Read it from a file"), file),
        h(
          "p",
          { class: "field" },
          h("label", { for: "text" }, "Study file"),
          text,
          h(
            "small",
            { id: "text-hint" },
            "TOML, as ",
            h("code", null, "hemofed study check"),
            " accepts it. Nothing is trained before the hospitals' officers have approved.",
          ),
        ),
        boxes,
        field(
          "fewest",
          "Begin with at least so many sites",
          { type: "number", min: "1", max: String(sites.length) },
          "Empty: as the study's waiting.quorum says",
        ),
      ),
    );
  } else body.append(empty("There is nobody to offer it to.", link("#/sites", "Invite a hospital first"), "."));
  return {
    title: "Offer a study",
    nodes: [
      h("p", { class: "crumbs" }, link("#/", "Overview")),
      h("div", { class: "head" }, h("h1", null, "Offer a study")),
      section,
    ],
  };
}
