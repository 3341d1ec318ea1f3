// The round under way: who was asked, who answered, who is waited for and since when.

import { badge, h } from "./dom.js";
import { running } from "./times.js";
import { countOf, duration } from "./words.js";

const PHASES = {
  train: "training",
  evaluate: "judging the model",
  keep: "sites keep their models",
  about: "sites describe their data",
};
const SLOW = 3; // times a site's usual time

/** Remembers when a phase was first seen: live.json tells only when it was last written. */
export function phaseClock() {
  let key = null;
  let began = null;
  return (live) => {
    const now = `${live.round} ${live.phase}`;
    if (now !== key) [key, began] = [now, live.since ?? live.at];
    return live.since ?? began;
  };
}

export function liveRound(live, began, records) {
  const asked = live.asked ?? [];
  const missed = live.missed ?? {};
  const answered = new Set(live.answered ?? []);
  const waited = asked.filter((site) => !answered.has(site) && !(site in missed));
  const usual = usualSeconds(records);
  const words = `Round ${live.round} of ${live.rounds}: ${PHASES[live.phase] ?? live.phase}. ${answered.size} of ${countOf(asked.length, "site")} answered`;
  const rest = waited.length
    ? [", ", countOf(waited.length, "site"), " waited for, ", running(began), " by now."]
    : ".";
  const order = [...waited, ...asked.filter((site) => !waited.includes(site))];
  return [
    h("p", { class: "live-words" }, words, rest),
    h(
      "ul",
      { class: "people", id: "people" },
      order.map((site) => person(site, { answered, missed, began, usual: usual.get(site), phase: live.phase })),
    ),
  ];
}

function person(site, { answered, missed, began, usual, phase }) {
  const name = h("strong", null, site);
  if (answered.has(site)) return h("li", { class: "answered" }, name, badge("good", "answered"));
  if (site in missed) return h("li", { class: "missed" }, name, badge("bad", "missed"), h("small", null, missed[site].text));
  const late = phase === "train" && usual && (Date.now() - Date.parse(began)) / 1000 > Math.max(SLOW * usual, 5);
  return h(
    "li",
    { class: "waited" },
    name,
    badge(late ? "warn" : "wait", late ? "slow" : "waited for"),
    h("small", null, running(began), usual && phase === "train" ? `, usually ${duration(usual)}` : ""),
  );
}

/** The median of what each site took for its last rounds. */
function usualSeconds(records) {
  const taken = new Map();
  for (const record of records.slice(-9)) {
    for (const [site, work] of Object.entries(record.work ?? {}))
      taken.set(site, [...(taken.get(site) ?? []), work.seconds]);
  }
  return new Map([...taken].map(([site, all]) => [site, [...all].sort((a, b) => a - b)[Math.floor(all.length / 2)]]));
}
