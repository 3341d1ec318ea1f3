// The result of a run: the selected round, and its scores on the test examples.

import { h, table } from "./dom.js";
import { formatBytes, formatDuration, formatScore, isNumber, metricName } from "./format.js";

const RESULT_METRICS = [
  "accuracy",
  "balanced_accuracy",
  "macro_f1",
  "auroc",
  "positive_auroc",
  "positive_auprc",
  "sensitivity_at_specificity",
  "calibration_error",
  "loss",
];

/** `results`: results.json. */
export function resultBody(results) {
  const test = results.test ?? {};
  const sites = Object.entries(test.sites ?? {}).sort(([a], [b]) => a.localeCompare(b));
  const overall = test.pooled ?? test.coordinator ?? {};
  const metrics = RESULT_METRICS.filter((name) => isNumber(overall[name]));
  const resultRow = (name, scores, note) => [
    [h("strong", null, name), note && h("small", null, note)],
    String(scores.n ?? "–"),
    ...metrics.map((metric) => formatScore(metric, scores[metric])),
  ];
  const rows = [
    resultRow(test.pooled ? "All sites" : "Coordinator", overall),
    ...sites.map(([site, scores]) => resultRow(site, scores, site === results.worst_site?.site && "lowest accuracy")),
  ];
  const columns = [
    { title: "Data" },
    { title: "Examples", number: true },
    ...metrics.map((metric) => ({ title: metricName(metric), number: true })),
  ];
  return [
    h("p", null, describeResults(results)),
    metrics.length
      ? table("Scores on the test examples, evaluated once, after the run", columns, rows, { id: "result-table" })
      : null,
  ];
}

function describeResults(results) {
  const sentences = [
    `The model of round ${results.best_round} of ${results.rounds}, selected by ${results.selected_by}.`,
    results.stop_reason && results.stop_reason !== "finished" ? `The run ended early: ${results.stop_reason}.` : "",
    results.void_rounds ? `${results.void_rounds} rounds were void: too few replies.` : "",
    isNumber(results.num_parameters)
      ? `${results.num_parameters.toLocaleString()} parameters; ${formatDuration(results.seconds)} of computing; updates ${formatBytes(results.traffic?.up)} up, models ${formatBytes(results.traffic?.down)} down.`
      : "",
  ];
  return sentences.filter(Boolean).join(" ");
}
