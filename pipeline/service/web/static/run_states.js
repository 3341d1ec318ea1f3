// The state of a run: its badge and text, the buttons for it, and small summaries of a run.

import { badge, h } from "./dom.js";
import { formatCountOf, formatScore, metricName, splitName, uncapitalize } from "./format.js";

// tone of the badge, and text
const STATES = {
  offered: ["wait", "Waiting for approvals; nothing has been trained."],
  starting: ["busy", "Starting at the sites."],
  running: ["busy", "Training."],
  waiting: ["wait", "Waiting for sites; continues automatically when enough are connected."],
  pausing: ["wait", "Pauses after the current round."],
  paused: ["neutral", "Paused between two rounds; nothing is lost."],
  stopping: ["wait", "Stops after the current round."],
  stopped: ["neutral", "Stopped. The models of the best round so far are saved."],
  finished: ["good", "Finished."],
  failed: ["bad", "Failed; the reason is below."],
};
const TERMINAL_STATES = ["stopped", "finished", "failed"];
const ACTIVE_STATES = ["starting", "running", "waiting", "pausing", "stopping"];

const BUTTONS = {
  begin: { label: "Start now", states: ["offered"], kind: "main" },
  pause: { label: "Pause", states: ["starting", "running", "waiting"], kind: null },
  resume: { label: "Resume", states: ["paused", "stopped", "failed"], kind: "main" },
  stop: { label: "Stop", states: ["offered", "starting", "running", "waiting", "pausing", "paused"], kind: "danger" },
};

export const stateBadge = (state) => badge((STATES[state] ?? ["quiet"])[0], state);
export const stateText = (state) => (STATES[state] ?? ["", ""])[1];
export const isTerminal = (state) => TERMINAL_STATES.includes(state);
export const isActive = (state) => ACTIVE_STATES.includes(state);

/** Address of a run's page. */
export const runHash = (id) => `#/runs/${encodeURIComponent(id)}`;

/** [{action, label, kind, disabledReason}]; the reason is empty for a button that can be pressed. */
export function runButtons(run, role) {
  return Object.entries(BUTTONS)
    .filter(([, button]) => button.states.includes(run.state))
    .map(([action, { label, kind }]) => ({ action, label, kind, disabledReason: disabledReason(action, run, role) }));
}

function disabledReason(action, run, role) {
  if (role !== "lead") return `Only a lead can do this; you are signed in as ${role}.`;
  const numApproved = approvedSites(run).length;
  if (action === "begin" && numApproved < run.min_sites)
    return `${formatCountOf(numApproved, "site")} of at least ${run.min_sites} approved; ask the hospitals' officers.`;
  return "";
}

export const approvedSites = (run) =>
  (run.sites ?? []).filter((site) => site.approved && !site.revoked && !isPast(site.expires));
export const connectedSites = (run) => (run.sites ?? []).filter((site) => site.connected);
export const isPast = (iso) => Boolean(iso) && Date.parse(iso) < Date.now();

export function progressBar(run) {
  const value = Math.min(run.round ?? 0, run.rounds ?? 0);
  return h(
    "span",
    { class: "progress" },
    h("progress", { max: run.rounds || 1, value, "aria-label": `round ${value} of ${run.rounds}` }),
    h("span", null, `${value} of ${run.rounds ?? "?"}`),
  );
}

export function headlineScore(run) {
  if (!run.headline) return "–";
  const { split, metric, value } = run.headline;
  return [formatScore(metric, value), h("small", null, `${uncapitalize(metricName(metric))}, ${splitName(split)}`)];
}
