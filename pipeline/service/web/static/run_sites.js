// The sites of a run: scores, counted and missed rounds, work; and the run's traffic.

import { lineChart } from "./chart.js";
import { badge, emptyState, h, table } from "./dom.js";
import {
  formatBytes,
  formatBytesTick,
  formatCount,
  formatCountOf,
  formatDuration,
  formatRanges,
  formatScore,
  metricName,
  splitName,
} from "./format.js";

export function siteTable(run, records, metric = "accuracy", split = "val") {
  if (!run.sites.length) return emptyState("This run has no sites.");
  const evaluated = records.filter((record) => record.metrics?.[split]?.sites).at(-1);
  const columns = [
    { title: "Site" },
    { title: "Connection" },
    { title: `${metricName(metric)}, ${splitName(split)}`, number: true },
    { title: "Examples", number: true },
    { title: "Counted", number: true },
    { title: "Missed", number: true },
    { title: "Last reason", text: true },
    { title: "Training time", number: true },
    { title: "Partial", number: true },
  ];
  const rows = run.sites.map(({ site, connected }) => {
    const summary = summarizeSite(site, records);
    const partialShare = summary.partialStepsDone / summary.partialStepsRequested;
    return [
      h("strong", null, site),
      connected ? badge("good", "connected") : badge("warn", "not connected"),
      formatScore(metric, evaluated?.metrics[split].sites[site]?.[metric]),
      formatCount(summary.numExamples),
      formatCount(summary.numCounted),
      formatCount(summary.missedRounds.length),
      summary.missedRounds.length
        ? [summary.reason, h("small", null, `round ${summary.missedRounds.at(-1)}`)]
        : "–",
      formatDuration(summary.seconds),
      summary.numPartial
        ? [
            formatCountOf(summary.numPartial, "round"),
            h("small", null, `${Math.round(100 * partialShare)} % of the steps`),
          ]
        : "–",
    ];
  });
  const caption = evaluated
    ? `Scores as of round ${evaluated.round}; all other columns since the start`
    : "All columns since the start";
  return table(caption, columns, rows, { id: "site-table" });
}

function summarizeSite(site, records) {
  const summary = {
    numCounted: 0,
    missedRounds: [],
    reason: "",
    seconds: 0,
    numExamples: null,
    numPartial: 0,
    partialStepsDone: 0,
    partialStepsRequested: 0,
  };
  for (const record of records) {
    if ((record.accepted ?? []).includes(site)) summary.numCounted += 1;
    if (site in (record.failures ?? {})) {
      const { kind, text } = record.failures[site];
      summary.missedRounds.push(record.round);
      summary.reason = `${kind.replaceAll("_", " ")}: ${text}`;
    }
    const work = record.work?.[site];
    if (!work) continue;
    summary.seconds += work.seconds;
    summary.numExamples = work.num_examples;
    if (work.steps_done < work.steps_requested) {
      summary.numPartial += 1;
      summary.partialStepsDone += work.steps_done;
      summary.partialStepsRequested += work.steps_requested;
    }
  }
  return summary;
}

/** Bytes since the start: of training, of evaluation, and their sum. */
export function trafficTotals(records) {
  const totals = { trainUp: 0, trainDown: 0, evaluateUp: 0, evaluateDown: 0 };
  for (const { bytes = {} } of records) {
    totals.trainUp += bytes.up ?? 0;
    totals.trainDown += bytes.down ?? 0;
    totals.evaluateUp += bytes.evaluate_up ?? 0;
    totals.evaluateDown += bytes.evaluate_down ?? 0;
  }
  return { ...totals, up: totals.trainUp + totals.evaluateUp, down: totals.trainDown + totals.evaluateDown };
}

export function trafficBody(records) {
  if (!records.length) return emptyState("No traffic yet.");
  const [up, down] = [[], []];
  const sum = { up: 0, down: 0 };
  for (const { round, bytes = {} } of records) {
    up.push([round, (sum.up += (bytes.up ?? 0) + (bytes.evaluate_up ?? 0))]);
    down.push([round, (sum.down += (bytes.down ?? 0) + (bytes.evaluate_down ?? 0))]);
  }
  const totals = trafficTotals(records);
  const rows = [
    ["Up, from the sites", totals.trainUp, totals.evaluateUp, totals.up],
    ["Down, to the sites", totals.trainDown, totals.evaluateDown, totals.down],
  ].map(([name, ...bytes]) => [name, ...bytes.map(formatBytes)]);
  return [
    lineChart({
      id: "chart-traffic",
      title: "Cumulative traffic",
      desc: `Up ${formatBytes(totals.up)}, down ${formatBytes(totals.down)} in ${records.length} rounds.`,
      lines: [
        { name: "down", kind: "down", color: "c1", points: down },
        { name: "up", kind: "up", color: "c0", points: up },
      ],
      format: formatBytesTick,
      exact: formatBytes,
      from: 0,
    }),
    table(
      "Traffic so far",
      [
        { title: "Direction" },
        { title: "Training", number: true },
        { title: "Evaluation", number: true },
        { title: "Total", number: true },
      ],
      rows,
      { hideCaption: true },
    ),
  ];
}
