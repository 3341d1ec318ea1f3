// Epsilon spent against what was promised, in bars and words; and answers that were not believed or not given.

import { badge, empty, h, svg, table } from "./dom.js";
import { countOf, isNumber, joined, ranges } from "./words.js";

// kinds of failures in rounds.jsonl -> their badges
const DOUBTS = { quarantined: "quarantined", privacy_budget: "refused" };
const KINDS = [
  ["dp_sgd", "noise at the sites, charged to their ledgers"],
  ["client_level_dp", "noise at the coordinator"],
  ["secure_aggregation", "secure sums"],
];
const BARE =
  "This run has no formal privacy protection: neither differential privacy nor secure aggregation. Images stay at the sites, but what a model or an update reveals about a single person is not bounded.";

/** `study`: the text as resolved; before the first round it is all there is. */
export function privacyBody(told, records, study = "") {
  const promises = told?.at_site ?? {};
  const spent = Object.assign({}, ...records.map((record) => record.epsilon ?? {}));
  const sites = [...new Set([...Object.keys(promises), ...Object.keys(spent)])].sort();
  const words = protection(told ?? {}, promises);
  const asked = KINDS.filter(([name]) => new RegExp(`^${name} *=|privacy\\.${name}\\]`, "m").test(study)).map(
    ([, words]) => words,
  );
  if (!words.length && !sites.length)
    return h(
      "p",
      null,
      asked.length
        ? `The study asks for ${joined(asked)}. What that promises each site is worked out when the run begins.`
        : BARE,
    );
  return [h("p", null, words.join(" ")), sites.length ? spending(sites, promises, spent, records) : null];
}

function protection(told, promises) {
  const words = [];
  const units = [...new Set(Object.values(promises).map((promise) => promise.unit))];
  if (units.length)
    words.push(
      `Differential privacy at the sites, with the ${joined(units)} as unit: noise is added before anything leaves, and every step is charged to the site's ledger.`,
    );
  if (units.includes("example")) words.push("A person with many images is promised next to nothing by this.");
  const noised = told.at_coordinator;
  if (noised)
    words.push(
      `Differential privacy of whole sites, by noise at the coordinator: epsilon ${noised.epsilon?.toFixed(2) ?? "?"} at delta ${noised.delta}. The coordinator itself is not held off by it.`,
    );
  if (told.secure_sum)
    words.push(
      `Secure sums: the coordinator sees sums over at least ${told.secure_sum.threshold ?? "several"} sites, no single update.`,
    );
  return words;
}

function spending(sites, promises, spent, records) {
  const refused = refusals(records);
  const rows = sites.map((site) => {
    const limit = promises[site]?.budget ?? refused.get(site)?.budget ?? promises[site]?.epsilon;
    const used = spent[site] ?? 0;
    const share = isNumber(limit) && limit > 0 ? used / limit : null;
    const out = refused.get(site);
    return [
      h("strong", null, site),
      share === null ? "–" : gauge(share),
      used.toFixed(2),
      isNumber(limit) ? limit.toFixed(2) : "no limit",
      isNumber(promises[site]?.epsilon) ? promises[site].epsilon.toFixed(2) : "–",
      promises[site]?.delta === undefined ? "–" : String(promises[site].delta),
      out
        ? badge("warn", `sits out since round ${out.first}`)
        : share === null
          ? badge("quiet", "only counted")
          : share > 0.999
            ? badge("still", "spent")
            : badge("good", `${Math.max(0, 100 - Math.floor(100 * share))} % left`),
    ];
  });
  const columns = [
    { title: "Site" },
    { title: "Share" },
    { title: "Spent", number: true },
    { title: "Limit", number: true },
    { title: "This study asks", number: true },
    { title: "Delta", number: true },
    { title: "State" },
  ];
  return table(
    "Epsilon spent on each site's data, as its ledger tells, against its limit: the site's budget where it is known, else what this study asks",
    columns,
    rows,
    { id: "epsilon-table" },
  );
}

function gauge(share) {
  const width = `${Math.min(100, 100 * share).toFixed(1)}%`;
  return svg(
    "svg",
    { class: "gauge", role: "img", "aria-label": `${Math.round(100 * share)} % spent`, width: "120", height: "12" },
    svg("rect", { class: "trough", width: "100%", height: "12", rx: 3 }),
    svg("rect", { class: share > 0.9 ? "full" : "part", width, height: "12", rx: 3 }),
  );
}

/** site -> {budget, first}: a refusal names the budget it would break. */
function refusals(records) {
  const found = new Map();
  for (const record of records) {
    for (const [site, { kind, text }] of Object.entries(record.missed ?? {})) {
      if (kind !== "privacy_budget" || found.has(site)) continue;
      const budget = Number(/ of ([\d.]+(?:e-?\d+)?) at delta/.exec(text)?.[1] ?? NaN);
      found.set(site, { first: record.round, budget: isNumber(budget) ? budget : undefined });
    }
  }
  return found;
}

/** Quarantined updates and refusals, alike ones of a site together; null if there are none. */
export function doubtsBody(records) {
  const cases = new Map();
  for (const record of records) {
    for (const [site, { kind, text }] of Object.entries(record.missed ?? {})) {
      if (!(kind in DOUBTS)) continue;
      const key = `${site} ${kind} ${text.replace(/[\d.e+-]*\d/g, "#")}`;
      const one = cases.get(key) ?? { site, kind: DOUBTS[kind], why: text, rounds: [] };
      one.rounds.push(record.round);
      cases.set(key, one);
    }
  }
  if (!cases.size)
    return records.length
      ? empty("None so far.", "Every answer was believed, and no site refused.")
      : empty("None so far.");
  const rows = [...cases.values()].map(({ site, kind, why, rounds }) => [
    h("strong", null, site),
    badge(kind === "refused" ? "still" : "bad", kind),
    ranges(rounds),
    why,
  ]);
  const quarantined = rows.length
    ? `${countOf(rows.length, "case")}: quarantined updates were left out of the model; a refusal is the site's own ledger saying no`
    : "";
  return table(
    quarantined,
    [{ title: "Site" }, { title: "Kind" }, { title: "Rounds" }, { title: "Why", words: true }],
    rows,
    { id: "doubt-table" },
  );
}
