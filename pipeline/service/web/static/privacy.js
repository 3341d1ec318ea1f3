// The privacy of a run: its guarantees, epsilon spent against the limit, and quarantined or refused updates.

import { badge, emptyState, h, svg, table } from "./dom.js";
import { formatCountOf, formatRanges, isNumber, joinNames } from "./format.js";

// kinds of `failures` in round records that the page lists -> text of their badge
const LISTED_KINDS = { quarantined: "quarantined", privacy_budget: "refused" };
// keys of [privacy] in a study
const MECHANISMS = [
  ["dp_sgd", "differential privacy at the sites"],
  ["client_level_dp", "client-level differential privacy"],
  ["secure_aggregation", "secure aggregation"],
];
const NO_PROTECTION =
  "This run has no formal privacy protection: neither differential privacy nor secure aggregation. Images stay at the sites, but what a model or an update reveals about a person is not bounded.";

/** `privacy`: privacy.json, null before the run has begun. `study`: the resolved TOML text. */
export function privacyBody(privacy, records, study = "") {
  const plans = privacy?.dp_sgd ?? {};
  const spent = Object.assign({}, ...records.map((record) => record.epsilon ?? {}));
  const sites = [...new Set([...Object.keys(plans), ...Object.keys(spent)])].sort();
  const guarantees = describeGuarantees(privacy ?? {}, plans);
  if (guarantees.length || sites.length)
    return [h("p", null, guarantees.join(" ")), sites.length ? epsilonTable(sites, plans, spent, records) : null];
  const requested = MECHANISMS.filter(([key]) =>
    new RegExp(`^${key} *=|privacy\\.${key}\\]`, "m").test(study),
  ).map(([, name]) => name);
  return h(
    "p",
    null,
    requested.length
      ? `The study asks for ${joinNames(requested)}. The guarantee for each site is computed when the run begins.`
      : NO_PROTECTION,
  );
}

function describeGuarantees(privacy, plans) {
  const sentences = [];
  const units = [...new Set(Object.values(plans).map((plan) => plan.privacy_unit))];
  if (units.length)
    sentences.push(
      `Differential privacy at the sites; the privacy unit is the ${joinNames(units)}. Noise is added before an update leaves the site, and every step is charged to the site's ledger.`,
    );
  if (units.includes("example")) sentences.push("A person with many images gets almost no protection from this.");
  const clientLevel = privacy.client_level_dp;
  if (clientLevel)
    sentences.push(
      `Client-level differential privacy by noise at the coordinator: epsilon ${clientLevel.epsilon?.toFixed(2) ?? "?"} at delta ${clientLevel.delta}. It does not protect against the coordinator itself.`,
    );
  if (privacy.secure_aggregation)
    sentences.push(
      `Secure aggregation: the coordinator learns sums over at least ${privacy.secure_aggregation.threshold ?? "several"} sites and no single update.`,
    );
  return sentences;
}

function epsilonTable(sites, plans, spent, records) {
  const refusals = budgetRefusals(records);
  const rows = sites.map((site) => {
    const refusal = refusals.get(site);
    const limit = refusal?.budget ?? plans[site]?.epsilon;
    const used = spent[site] ?? 0;
    const share = isNumber(limit) && limit > 0 ? used / limit : null;
    return [
      h("strong", null, site),
      share === null ? "–" : gauge(share),
      used.toFixed(2),
      isNumber(limit) ? limit.toFixed(2) : "no limit",
      isNumber(plans[site]?.epsilon) ? plans[site].epsilon.toFixed(2) : "–",
      plans[site]?.delta === undefined ? "–" : String(plans[site].delta),
      budgetBadge(share, refusal),
    ];
  });
  const columns = [
    { title: "Site" },
    { title: "Share" },
    { title: "Spent", number: true },
    { title: "Limit", number: true },
    { title: "Planned", number: true },
    { title: "Delta", number: true },
    { title: "State" },
  ];
  return table(
    "Epsilon spent on each site's data according to its ledger, and the limit: the site's budget where it is known, otherwise the epsilon that this study plans",
    columns,
    rows,
    { id: "epsilon-table" },
  );
}

function budgetBadge(share, refusal) {
  if (refusal) return badge("warn", `refuses since round ${refusal.firstRound}`);
  if (share === null) return badge("quiet", "no limit");
  if (share > 0.999) return badge("neutral", "spent");
  return badge("good", `${Math.max(0, 100 - Math.floor(100 * share))} % left`);
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

/** site -> {firstRound, budget}; only the text of a refusal has the budget. */
function budgetRefusals(records) {
  const refusals = new Map();
  for (const record of records) {
    for (const [site, { kind, text }] of Object.entries(record.failures ?? {})) {
      if (kind !== "privacy_budget" || refusals.has(site)) continue;
      const budget = Number(/ of ([\d.]+(?:e-?\d+)?) at delta/.exec(text)?.[1] ?? NaN);
      refusals.set(site, { firstRound: record.round, budget: isNumber(budget) ? budget : undefined });
    }
  }
  return refusals;
}

/** Quarantined updates and refusals. Those of one site whose texts differ only in numbers share a row. */
export function quarantineBody(records) {
  const cases = new Map();
  for (const record of records) {
    for (const [site, { kind, text }] of Object.entries(record.failures ?? {})) {
      if (!(kind in LISTED_KINDS)) continue;
      const key = `${site} ${kind} ${text.replace(/[\d.e+-]*\d/g, "#")}`;
      const entry = cases.get(key) ?? { site, kind: LISTED_KINDS[kind], reason: text, rounds: [] };
      entry.rounds.push(record.round);
      cases.set(key, entry);
    }
  }
  if (!cases.size)
    return records.length
      ? emptyState("None so far.", "No update was quarantined, and no site refused a round.")
      : emptyState("None so far.");
  const rows = [...cases.values()].map(({ site, kind, reason, rounds }) => [
    h("strong", null, site),
    badge(kind === "refused" ? "neutral" : "bad", kind),
    formatRanges(rounds),
    reason,
  ]);
  return table(
    `${formatCountOf(rows.length, "case")}. Quarantined updates were left out of the aggregate; a refusal means that the round would exceed the site's privacy budget.`,
    [{ title: "Site" }, { title: "Kind" }, { title: "Rounds" }, { title: "Reason", text: true }],
    rows,
    { id: "quarantine-table" },
  );
}
