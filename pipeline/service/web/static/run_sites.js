// Each site in a run: its score, the rounds it was counted or missed in, its work; and the traffic.

import { chart } from "./chart.js";
import { badge, empty, h, table } from "./dom.js";
import { countOf, duration, metricName, ranges, score, size, sizeTick, splitName, whole } from "./words.js";

export function siteTable(run, records, metric = "accuracy", split = "val") {
  const names = run.sites.map((site) => site.site);
  if (!names.length) return empty("No site is in this run.");
  const judged = records.filter((record) => record.metrics?.[split]?.sites).at(-1);
  const columns = [
    { title: "Site" },
    { title: "Connection" },
    { title: `${metricName(metric)}, ${splitName(split)}`, number: true },
    { title: "Examples", number: true },
    { title: "Counted", number: true },
    { title: "Missed", number: true },
    { title: "Last reason", words: true },
    { title: "Work", number: true },
    { title: "Cut short", number: true },
  ];
  const rows = run.sites.map((site) => {
    const sum = summary(site.site, records);
    return [
      h("strong", null, site.site),
      site.connected ? badge("good", "connected") : badge("warn", "not connected"),
      score(metric, judged?.metrics[split].sites[site.site]?.[metric]),
      whole(sum.examples),
      whole(sum.counted),
      whole(sum.missed.length),
      sum.missed.length ? [sum.reason, h("small", null, `round ${ranges(sum.missed.slice(-1))}`)] : "–",
      duration(sum.seconds),
      sum.partial
        ? [countOf(sum.partial, "round"), h("small", null, `${Math.round(100 * sum.share)} % of the steps`)]
        : "–",
    ];
  });
  const caption = judged
    ? `Scores as of round ${judged.round}; rounds, work and misses since the start`
    : "Rounds, work and misses since the start";
  return table(caption, columns, rows, { id: "site-table" });
}

export function summary(site, records) {
  const sum = { counted: 0, missed: [], reason: "", seconds: 0, partial: 0, share: 1, examples: null };
  let [asked, done] = [0, 0];
  for (const record of records) {
    if ((record.counted ?? []).includes(site)) sum.counted += 1;
    if (site in (record.missed ?? {})) {
      sum.missed.push(record.round);
      const { kind, text } = record.missed[site];
      sum.reason = `${kind.replaceAll("_", " ")}: ${text}`;
    }
    const work = record.work?.[site];
    if (!work) continue;
    sum.seconds += work.seconds;
    sum.examples = work.examples;
    if (work.done < work.asked) {
      sum.partial += 1;
      asked += work.asked;
      done += work.done;
    }
  }
  return { ...sum, share: asked ? done / asked : 1 };
}

export function totals(records) {
  const sum = { up: 0, down: 0, judgeUp: 0, judgeDown: 0 };
  for (const { bytes = {} } of records) {
    sum.up += bytes.up ?? 0;
    sum.down += bytes.down ?? 0;
    sum.judgeUp += bytes.evaluate_up ?? 0;
    sum.judgeDown += bytes.evaluate_down ?? 0;
  }
  return { ...sum, allUp: sum.up + sum.judgeUp, allDown: sum.down + sum.judgeDown };
}

export function traffic(records) {
  if (!records.length) return empty("Nothing has travelled yet.");
  const [up, down] = [[], []];
  const sum = { up: 0, down: 0 };
  for (const { round, bytes = {} } of records) {
    up.push([round, (sum.up += (bytes.up ?? 0) + (bytes.evaluate_up ?? 0))]);
    down.push([round, (sum.down += (bytes.down ?? 0) + (bytes.evaluate_down ?? 0))]);
  }
  const all = totals(records);
  const lines = [
    { name: "down", kind: "down", shade: "c1", points: down },
    { name: "up", kind: "up", shade: "c0", points: up },
  ];
  const rows = [
    ["Up, from the sites", size(all.up), size(all.judgeUp), size(all.allUp)],
    ["Down, to the sites", size(all.down), size(all.judgeDown), size(all.allDown)],
  ];
  return [
    chart({
      id: "chart-traffic",
      title: "Traffic, added up",
      desc: `Up ${size(all.allUp)}, down ${size(all.allDown)} in ${records.length} rounds.`,
      lines,
      format: sizeTick,
      exact: size,
      from: 0,
    }),
    table(
      "Traffic so far",
      [
        { title: "Way" },
        { title: "Training", number: true },
        { title: "Judging", number: true },
        { title: "Together", number: true },
      ],
      rows,
      { hideCaption: true },
    ),
  ];
}
