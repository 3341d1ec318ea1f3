// All runs, all sites, and the approvals that are pending.

import { get } from "./api.js";
import { announce, badge, emptyState, h, link, panel, renderIfChanged, table } from "./dom.js";
import { formatCountOf } from "./format.js";
import {
  approvedSites,
  connectedSites,
  headlineScore,
  isTerminal,
  progressBar,
  runHash,
  stateBadge,
} from "./run_states.js";
import { SITE_COLUMNS, siteRows, withoutHeartbeat } from "./site_rows.js";
import { listen } from "./stream.js";
import { timeAgo } from "./times.js";

export async function overviewPage(user) {
  const runsPanel = panel("runs", "Runs", { wide: true });
  const pendingPanel = panel("pending", "Pending approvals", { wide: true });
  const sitesPanel = panel("sites", "Sites", { wide: true });
  const summary = h("p", { class: "subtitle" });
  let runs = await get("/api/runs");
  let sites = await get("/api/sites");
  let approvals = await get("/api/approvals");

  function draw() {
    const numActive = runs.filter((run) => !isTerminal(run.state)).length;
    const enrolled = sites.filter((site) => !site.left);
    const numConnected = enrolled.filter((site) => site.connected).length;
    summary.textContent = `${formatCountOf(numActive, "active run")}, ${numConnected} of ${formatCountOf(enrolled.length, "site")} connected.`;
    renderIfChanged(runsPanel.body, runs.map(withoutLiveStatus), () => runTable(runs, user));
    renderIfChanged(pendingPanel.body, [approvals, runs.map((run) => run.name)], () => pendingTable(approvals, runs));
    renderIfChanged(sitesPanel.body, sites.map(withoutHeartbeat), () =>
      sites.length
        ? table("Status of the sites", SITE_COLUMNS, siteRows(sites), { hideCaption: true })
        : emptySites(user),
    );
  }

  const leave = listen(() => "/api/events", {
    runs: async (newRuns) => {
      announceStateChanges(runs, newRuns);
      const mustReload = approvalKey(runs) !== approvalKey(newRuns);
      runs = newRuns;
      draw();
      if (!mustReload) return;
      approvals = await get("/api/approvals");
      draw();
    },
    sites: (newSites) => {
      sites = newSites;
      draw();
    },
  });
  draw();
  const offerButton = user.role === "lead" && h("a", { class: "button main", href: "#/offer" }, "Offer a study");
  const head = h(
    "div",
    { class: "head" },
    h("div", null, h("h1", null, "Overview"), summary),
    h("p", { class: "actions" }, offerButton),
  );
  const nodes = [head, runsPanel.section, pendingPanel.section, sitesPanel.section];
  return { title: "Overview", nodes, leave };
}

// what changes with every heartbeat must not redraw the table
const withoutLiveStatus = (run) => ({ ...run, live: null, sites: run.sites.map(withoutHeartbeat) });
const approvalKey = (runs) =>
  JSON.stringify(
    runs.map((run) => [run.id, run.state, run.sites.map((site) => [site.approved, site.expires, site.revoked])]),
  );

function runTable(runs, user) {
  if (!runs.length) {
    return user.role === "lead"
      ? emptyState(
          "No runs yet.",
          link("#/offer", "Offer a study"),
          " to the hospitals, or type ",
          h("code", null, "hemofed coordinator run STUDY"),
          " on the coordinator's machine.",
        )
      : emptyState("No runs yet.", "They appear here as soon as a lead offers a study.");
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
      [link(runHash(run.id), run.name), h("small", null, run.strategy, run.id === run.name ? "" : ` · ${run.id}`)],
      [stateBadge(run.state), run.reason && h("small", null, run.reason)],
      progressBar(run),
      headlineScore(run),
      `${connectedSites(run).length} of ${run.sites.length}`,
      `${approvedSites(run).length} of ${run.sites.length}`,
      run.started ? timeAgo(run.started) : ["not yet", h("small", null, "offered ", timeAgo(run.created))],
    ]);
  return table("All runs, newest first", columns, rows, { hideCaption: true, id: "run-table" });
}

const APPROVAL_BADGES = { pending: ["wait", "pending"], expired: ["warn", "expired"], revoked: ["bad", "revoked"] };

function pendingTable(approvals, runs) {
  const runById = new Map(runs.map((run) => [run.id, run]));
  const pending = approvals.filter(
    (approval) => approval.state !== "approved" && !isTerminal(runById.get(approval.run)?.state),
  );
  if (!pending.length) return emptyState("No approval is pending.");
  const rows = pending.map((approval) => {
    const run = runById.get(approval.run);
    const revoked = run?.sites.find(({ site }) => site === approval.site)?.revoked;
    const since = { pending: run?.created, expired: approval.expires, revoked }[approval.state];
    return [
      approval.site,
      link(runHash(approval.run), run?.name ?? approval.run),
      badge(...(APPROVAL_BADGES[approval.state] ?? ["quiet", approval.state])),
      timeAgo(since),
    ];
  });
  return [
    h("p", { class: "quiet" }, "Officers approve at their hospital, with ", h("code", null, "hemofed site approve HOME"), "."),
    table(
      "Approvals that runs wait for",
      [{ title: "Site" }, { title: "Run" }, { title: "Approval" }, { title: "Since" }],
      rows,
      { hideCaption: true },
    ),
  ];
}

const emptySites = (user) =>
  user.role === "lead"
    ? emptyState(
        "No sites yet.",
        link("#/sites", "Invite a hospital"),
        ": it gets a one-time token and joins with one command.",
      )
    : emptyState("No sites yet.", "A lead invites them.");

function announceStateChanges(before, after) {
  const stateById = new Map(before.map((run) => [run.id, run.state]));
  const changed = after.filter((run) => stateById.get(run.id) !== run.state);
  if (changed.length) announce(changed.map((run) => `${run.name} is ${run.state}.`).join(" "));
}
