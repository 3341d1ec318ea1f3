// The papers of a run: who approved it, its study in words and as text, and what can be taken home.

import { filePath } from "./api.js";
import { badge, empty, h, link, table } from "./dom.js";
import { past } from "./states.js";
import { at } from "./times.js";
import { size } from "./words.js";

const KINDS = [
  ["report", "Reports"],
  ["model", "Models"],
  ["table", "Tables"],
  ["plot", "Plots"],
];

export function approvalsBody(run) {
  if (!run.sites.length) return empty("No site is in this run.");
  const rows = run.sites.map((site) => [
    [h("strong", null, site.site), !site.connected && h("small", null, "not connected")],
    approvalState(site),
    at(site.approved),
    expiry(site),
  ]);
  const waits = run.sites.some((site) => !site.approved && !site.withdrawn);
  return [
    table(
      "Approvals by the hospitals' officers",
      [{ title: "Site" }, { title: "Approval" }, { title: "Given" }, { title: "Expires" }],
      rows,
      { hideCaption: true, id: "approval-table" },
    ),
    waits &&
      h(
        "p",
        { class: "quiet" },
        "The hospital's officer reads the study there and approves it with ",
        h("code", null, "hemofed site approve HOME"),
        ".",
      ),
  ];
}

function approvalState(site) {
  if (site.withdrawn) return [badge("bad", "withdrawn"), h("small", null, at(site.withdrawn))];
  if (!site.approved) return badge("wait", "pending");
  return past(site.expires) ? badge("warn", "expired") : badge("good", "approved");
}

const expiry = (site) => (site.approved && !site.expires ? "never" : at(site.expires));

export function filesBody(run, files) {
  if (!files?.length) return empty("Nothing to download yet.", "Models and the report are written when the run ends.");
  return KINDS.map(([kind, title]) => [title, files.filter((file) => file.kind === kind)])
    .filter(([, found]) => found.length)
    .map(([title, found]) => [
      h("h3", null, title),
      h(
        "ul",
        { class: "files" },
        found.map((file) =>
          h(
            "li",
            null,
            h(
              "a",
              {
                href: filePath(run.id, file.path),
                ...(opens(file) ? { target: "_blank", rel: "noopener" } : { download: file.path.split("/").at(-1) }),
              },
              file.path,
            ),
            " ",
            h("span", { class: "quiet" }, size(file.bytes)),
          ),
        ),
      ),
    ]);
}

const opens = (file) => file.path.endsWith(".html"); // a page to read; everything else is saved

export function studyBody(run) {
  const about = run.about ?? [];
  return [
    about.length
      ? h(
          "ul",
          { class: "plain-words" },
          about.map((line) =>
            h(
              "li",
              null,
              Array.isArray(line) ? [h("strong", null, line[0]), ": ", line.slice(1).join(" ")] : String(line),
            ),
          ),
        )
      : null,
    run.offer?.plan &&
      h(
        "dl",
        { class: "facts" },
        fact("Plan", run.offer.plan),
        fact("Offer", run.offer.digest),
        fact("Version", run.offer.version),
        fact("Coordinator's key", run.offer.coordinator),
      ),
    h(
      "details",
      { id: "study-text" },
      h("summary", null, "Study file"),
      h("pre", { tabindex: "0", "aria-label": "study file" }, run.study ?? ""),
    ),
  ];
}

const fact = (name, value) => value && [h("dt", null, name), h("dd", null, h("code", null, value))];

export const crumbs = () => h("p", { class: "crumbs" }, link("#/", "Overview"));
