// The round in progress: which sites were asked, which have replied, and how long the others have taken so far.

import { badge, h } from "./dom.js";
import { formatCountOf, formatDuration } from "./format.js";
import { elapsedTime } from "./times.js";

const PHASES = {
  train: "training",
  evaluate: "evaluating the model",
  save_personal: "sites save their personalized models",
  data_summary: "sites describe their data",
};
const SLOW_FACTOR = 3; // a site is slow after this multiple of its usual time
const MIN_SLOW_SECONDS = 5;
const NUM_RECENT_ROUNDS = 9;

/** Returns a function that returns the start of the current phase: live.json has only the time of its last change. */
export function createPhaseTimer() {
  let phaseKey = null;
  let startedAt = null;
  return (live) => {
    const key = `${live.round} ${live.phase}`;
    if (key !== phaseKey) [phaseKey, startedAt] = [key, live.at];
    return startedAt;
  };
}

export function liveRoundBody(live, startedAt, records) {
  const requested = live.requested ?? [];
  const failures = live.failures ?? {};
  const replied = new Set(live.replied ?? []);
  const waiting = requested.filter((site) => !replied.has(site) && !(site in failures));
  const secondsBySite = medianSeconds(records);
  const phase = PHASES[live.phase] ?? live.phase;
  const text = `Round ${live.round} of ${live.rounds}: ${phase}. ${replied.size} of ${formatCountOf(requested.length, "site")} replied`;
  const rest = waiting.length
    ? [", waiting for ", formatCountOf(waiting.length, "site"), " for ", elapsedTime(startedAt), "."]
    : ".";
  const order = [...waiting, ...requested.filter((site) => !waiting.includes(site))];
  const items = order.map((site) => {
    if (replied.has(site)) return siteItem(site, "replied", badge("good", "replied"));
    if (site in failures) return siteItem(site, "failed", badge("bad", "missed"), failures[site].text);
    return waitingItem(site, startedAt, live.phase === "train" ? secondsBySite.get(site) : undefined);
  });
  return [h("p", { class: "live-text" }, text, rest), h("ul", { class: "site-cards", id: "live-sites" }, items)];
}

const siteItem = (site, kind, state, ...details) =>
  h("li", { class: kind }, h("strong", null, site), state, details.length > 0 && h("small", null, details));

/** `usualSeconds`: undefined if it is unknown. */
function waitingItem(site, startedAt, usualSeconds) {
  const seconds = (Date.now() - Date.parse(startedAt)) / 1000;
  const isSlow = usualSeconds && seconds > Math.max(SLOW_FACTOR * usualSeconds, MIN_SLOW_SECONDS);
  const state = badge(isSlow ? "warn" : "wait", isSlow ? "slow" : "waiting");
  const usual = usualSeconds ? `, usually ${formatDuration(usualSeconds)}` : "";
  return siteItem(site, "waiting", state, elapsedTime(startedAt), usual);
}

/** site -> median training time in its recent rounds. */
function medianSeconds(records) {
  const times = new Map();
  for (const record of records.slice(-NUM_RECENT_ROUNDS)) {
    for (const [site, work] of Object.entries(record.work ?? {}))
      times.set(site, [...(times.get(site) ?? []), work.seconds]);
  }
  return new Map(
    [...times].map(([site, seconds]) => [site, seconds.sort((a, b) => a - b)[Math.floor(seconds.length / 2)]]),
  );
}
