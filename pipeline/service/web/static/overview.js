// All runs, all sites, and what waits for somebody.

import { get } from "./api.js";
import { announce, badge, empty, h, link, panel, show, table } from "./dom.js";
import { SITE_COLUMNS, siteRows, steady } from "./site_rows.js";
import { approvals, connected, headline, isOver, progress, stateBadge } from "./states.js";
import { listen } from "./stream.js";
import { since } from "./times.js";
import { countOf } from "./words.js";

export const toRun = (run) => `#/runs/${encodeURIComponent(run.id ?? run)}`;

export async function overviewPage(me) {
  const runs = panel("runs", "Runs", { wide: true });
  const pending = panel("pending", "Approvals pending", { wide: true });
  const sites = panel("sites", "Sites", { wide: true });
  const sum = h("p", { class: "subtitle" });
  const now = { runs: await get("/api/runs"), sites: await get("/api/sites"), approvals: await get("/api/approvals") };

  function draw() {
    const active = now.runs.filter((run) => !isOver(run.state)).length;
    const here = now.sites.filter((site) => !site.left);
    sum.textContent = `${countOf(active, "run")} under way, ${here.filter((site) => site.connected).length} of ${countOf(here.length, "site")} connected.`;
    show(runs.body, now.runs.map(quietly), () => runTable(now.runs, me));
    show(pending.body, [now.approvals, now.runs.map((run) => run.name)], () => pendingTable(now.approvals, now.runs));
    show(sites.body, now.sites.map(steady), () =>
      now.sites.length
        ? table("Health of the sites", SITE_COLUMNS, siteRows(now.sites), { hideCaption: true })
        : noSites(me),
    );
  }

  const leave = listen(() => "/api/events", {
    runs: async (told) => {
      tellChanges(now.runs, told);
      const asked = standing(now.runs) !== standing(told);
      now.runs = told;
      draw();
      if (!asked) return;
      now.approvals = await get("/api/approvals");
      draw();
    },
    sites: (told) => {
      now.sites = told;
      draw();
    },
  });
  draw();
  const offer = me.role === "lead" && h("a", { class: "button main", href: "#/offer" }, "Offer a study");
  const head = h(
    "div",
    { class: "head" },
    h("div", null, h("h1", null, "Overview"), sum),
    h("p", { class: "actions" }, offer),
  );
  return { title: "Overview", nodes: [head, runs.section, pending.section, sites.section], leave };
}

// what beats all the time draws nothing anew
const quietly = (run) => ({ ...run, live: null, sites: run.sites.map(steady) });
const standing = (runs) =>
  JSON.stringify(
    runs.map((run) => [run.id, run.state, run.sites.map((site) => [site.approved, site.expires, site.withdrawn])]),
  );

function runTable(runs, me) {
  if (!runs.length) {
    return me.role === "lead"
      ? empty(
          "No runs yet.",
          "Offer a study to the hospitals: ",
          link("#/offer", "Offer a study"),
          ", or ",
          h("code", null, "hemofed coordinator run STUDY"),
          " on the coordinator's machine.",
        )
      : empty("No runs yet.", "They appear here as soon as a lead offers a study.");
  }
  const columns = [
    { title: "Run" },
    { title: "State" },
    { title: "Round" },
    { title: "Score", number: true },
    { title: "Connected", number: true },
    { title: "Approved", number: true },
    { title: "Started" },
  ];
  const rows = [...runs]
    .sort((a, b) => Date.parse(b.created) - Date.parse(a.created))
    .map((run) => [
      [link(toRun(run), run.name), h("small", null, run.strategy, run.id === run.name ? "" : ` · ${run.id}`)],
      [stateBadge(run.state), run.reason && h("small", null, run.reason)],
      progress(run),
      headline(run),
      `${connected(run).length} of ${run.sites.length}`,
      `${approvals(run).length} of ${run.sites.length}`,
      run.started ? since(run.started) : ["not yet", h("small", null, "offered ", since(run.created))],
    ]);
  return table("All runs, the newest first", columns, rows, { hideCaption: true, id: "run-table" });
}

function pendingTable(all, runs) {
  const names = new Map(runs.map((run) => [run.id, run]));
  const wanted = all.filter((approval) => approval.state !== "approved" && !isOver(names.get(approval.run)?.state));
  if (!wanted.length) return empty("Nothing waits for an approval.");
  const kind = { pending: ["wait", "pending"], expired: ["warn", "expired"], withdrawn: ["bad", "withdrawn"] };
  const rows = wanted.map((approval) => {
    const run = names.get(approval.run);
    const place = run?.sites.find((site) => site.site === approval.site);
    const from = { pending: run?.created, expired: approval.expires, withdrawn: place?.withdrawn }[approval.state];
    return [
      approval.site,
      link(toRun(approval.run), run?.name ?? approval.run),
      badge(...(kind[approval.state] ?? ["quiet", approval.state])),
      since(from),
    ];
  });
  return [
    h(
      "p",
      { class: "quiet" },
      "The hospital's officer approves there, with ",
      h("code", null, "hemofed site approve HOME"),
      ".",
    ),
    table(
      "Approvals that a run waits for",
      [{ title: "Site" }, { title: "Run" }, { title: "Approval" }, { title: "Since" }],
      rows,
      { hideCaption: true },
    ),
  ];
}

const noSites = (me) =>
  me.role === "lead"
    ? empty(
        "No sites yet.",
        link("#/sites", "Invite a hospital"),
        ": it gets a one-time token and joins with one command.",
      )
    : empty("No sites yet.", "A lead invites them.");

/** Only a change of state is read out. */
function tellChanges(before, after) {
  const was = new Map(before.map((run) => [run.id, run.state]));
  const changed = after.filter((run) => was.get(run.id) !== run.state);
  if (changed.length) announce(changed.map((run) => `${run.name} is ${run.state}.`).join(" "));
}
