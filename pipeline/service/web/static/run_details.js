// Details of a run: approvals, downloads, and the study as sentences, by what leaves the sites, and as text.

import { filePath } from "./api.js";
import { badge, emptyState, h, link, table } from "./dom.js";
import { formatBytes } from "./format.js";
import { isPast } from "./run_states.js";
import { dateTime } from "./times.js";

const FILE_KINDS = [
  ["report", "Reports"],
  ["model", "Models"],
  ["table", "Tables"],
  ["plot", "Plots"],
];

export function approvalsBody(run) {
  if (!run.sites.length) return emptyState("This run has no sites.");
  const rows = run.sites.map((site) => [
    [h("strong", null, site.site), !site.connected && h("small", null, "not connected")],
    approvalBadge(site),
    dateTime(site.approved),
    site.approved && !site.expires ? "never" : dateTime(site.expires),
  ]);
  const isPending = run.sites.some((site) => !site.approved && !site.revoked);
  return [
    table(
      "Approvals of the hospitals' officers",
      [{ title: "Site" }, { title: "Approval" }, { title: "Approved" }, { title: "Expires" }],
      rows,
      { hideCaption: true, id: "approval-table" },
    ),
    isPending &&
      h(
        "p",
        { class: "quiet" },
        "Officers read and approve the study at their hospital, with ",
        h("code", null, "hemofed site approve HOME"),
        ".",
      ),
  ];
}

function approvalBadge(site) {
  if (site.revoked) return [badge("bad", "revoked"), h("small", null, dateTime(site.revoked))];
  if (!site.approved) return badge("wait", "pending");
  return isPast(site.expires) ? badge("warn", "expired") : badge("good", "approved");
}

export function filesBody(run, files) {
  if (!files?.length)
    return emptyState("Nothing to download yet.", "Models and the report are written when the run ends.");
  return FILE_KINDS.map(([kind, title]) => [title, files.filter((file) => file.kind === kind)])
    .filter(([, matching]) => matching.length)
    .map(([title, matching]) => [
      h("h3", null, title),
      h(
        "ul",
        { class: "files" },
        matching.map((file) =>
          h("li", null, fileLink(run, file), " ", h("span", { class: "quiet" }, formatBytes(file.bytes))),
        ),
      ),
    ]);
}

/** HTML files open in a new tab, all others are saved. */
function fileLink(run, file) {
  const attrs = file.path.endsWith(".html")
    ? { target: "_blank", rel: "noopener" }
    : { download: file.path.split("/").at(-1) };
  return h("a", { href: filePath(run.id, file.path), ...attrs }, file.path);
}

export function studyBody(run) {
  const sentences = run.study_summary ?? [];
  return [
    sentences.length
      ? h(
          "ul",
          { class: "study-summary" },
          sentences.map((sentence) => h("li", null, sentence)),
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
    run.disclosures?.length && disclosureList(run.disclosures),
    h(
      "details",
      { id: "study-text" },
      h("summary", null, "Study file"),
      h("pre", { tabindex: "0", "aria-label": "study file" }, run.study ?? ""),
    ),
  ];
}

function disclosureList(disclosures) {
  const rows = disclosures.map((row) => [
    [h("strong", null, row.content), h("small", null, row.detail)],
    row.when,
    row.receiver,
    [row.protection, row.reason !== row.protection && h("small", null, row.reason)],
  ]);
  return h(
    "details",
    { id: "study-disclosures" },
    h("summary", null, "What leaves each site"),
    table(
      "What leaves each site",
      [{ title: "What", text: true }, { title: "When" }, { title: "Who learns it" }, { title: "Protected by", text: true }],
      rows,
      { hideCaption: true, id: "disclosure-table" },
    ),
  );
}

const fact = (name, value) => value && [h("dt", null, name), h("dd", null, h("code", null, value))];

export const crumbs = () => h("p", { class: "crumbs" }, link("#/", "Overview"));
