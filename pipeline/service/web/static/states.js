// What a run's state means in words, and which buttons go with it.

import { badge, h } from "./dom.js";
import { countOf, inText, metricName, score, splitName } from "./words.js";

// tone and words; the badge has a shape beside its colour
const STATES = {
  offered: ["wait", "Waiting for approvals: nothing has been trained."],
  starting: ["busy", "Starting at the sites."],
  running: ["busy", "Training."],
  waiting: ["wait", "Waiting for sites: it goes on by itself as soon as enough are connected."],
  pausing: ["wait", "Pauses when the present round is done."],
  paused: ["still", "Paused between two rounds; nothing is lost."],
  stopping: ["wait", "Stops when the present round is done."],
  stopped: ["still", "Stopped. The models of the best round so far are kept."],
  finished: ["good", "Finished."],
  failed: ["bad", "Failed; the reason is below."],
};

const BUTTONS = {
  begin: { label: "Start now", states: ["offered"], kind: "main" },
  pause: { label: "Pause", states: ["starting", "running", "waiting"], kind: "plain" },
  resume: { label: "Resume", states: ["paused", "stopped", "failed"], kind: "main" },
  stop: { label: "Stop", states: ["offered", "starting", "running", "waiting", "pausing", "paused"], kind: "danger" },
};

export const stateBadge = (state) => badge((STATES[state] ?? ["quiet"])[0], state);
export const stateWords = (state) => (STATES[state] ?? ["", ""])[1];
export const isOver = (state) => ["stopped", "finished", "failed"].includes(state);
export const isLive = (state) => ["starting", "running", "waiting", "pausing", "stopping"].includes(state);

/** [{action, label, kind, why}]: `why` says why it cannot be pressed, or is empty. */
export function buttonsFor(run, role) {
  const fitting = Object.entries(BUTTONS).filter(([, button]) => button.states.includes(run.state));
  return fitting.map(([action, { label, kind }]) => ({ action, label, kind, why: objection(action, run, role) }));
}

function objection(action, run, role) {
  if (role !== "lead") return `Only a lead may do this; you are signed in as ${role}.`;
  const approved = approvals(run).length;
  const needed = run.fewest ?? 1;
  if (action === "begin" && approved < needed)
    return `${countOf(approved, "site")} approved of at least ${needed}; ask the hospitals' officers.`;
  return "";
}

export const approvals = (run) =>
  (run.sites ?? []).filter((site) => site.approved && !site.withdrawn && !past(site.expires));
export const connected = (run) => (run.sites ?? []).filter((site) => site.connected);
export const past = (iso) => Boolean(iso) && Date.parse(iso) < Date.now();

export function progress(run) {
  const done = Math.min(run.round ?? 0, run.rounds ?? 0);
  return h(
    "span",
    { class: "progress" },
    h("progress", { max: run.rounds || 1, value: done, "aria-label": `round ${done} of ${run.rounds}` }),
    h("span", null, `${done} of ${run.rounds ?? "?"}`),
  );
}

export function headline(run) {
  if (!run.headline) return "–";
  const { split, metric, value } = run.headline;
  return [score(metric, value), h("small", null, `${inText(metricName(metric))}, ${splitName(split)}`)];
}
