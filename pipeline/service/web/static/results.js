// What came out: the chosen round and how the model did on examples it had never seen.

import { h, table } from "./dom.js";
import { isNumber, metricName, score, size, duration } from "./words.js";

const SHOWN = [
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

export function resultBody(results) {
  const test = results.test ?? {};
  const sites = Object.entries(test.sites ?? {}).sort(([a], [b]) => a.localeCompare(b));
  const whole = test.pooled ?? test.coordinator ?? {};
  const metrics = SHOWN.filter((name) => isNumber(whole[name]));
  const worst = results.worst?.site;
  const row = (name, values, mark) => [
    [h("strong", null, name), mark && h("small", null, mark)],
    String(values.n ?? "–"),
    ...metrics.map((metric) => score(metric, values[metric])),
  ];
  const rows = [
    row(test.pooled ? "All sites" : "Coordinator", whole),
    ...sites.map(([site, values]) => row(site, values, site === worst && "the lowest")),
  ];
  const columns = [
    { title: "Where" },
    { title: "Examples", number: true },
    ...metrics.map((metric) => ({ title: metricName(metric), number: true })),
  ];
  const words = [
    `The model of round ${results.best_round} of ${results.rounds}, chosen by ${results.chosen_by}.`,
    results.stopped && results.stopped !== "finished" ? `It ended ${results.stopped}.` : "",
    results.void_rounds ? `${results.void_rounds} rounds were void: too few answers.` : "",
    isNumber(results.parameters)
      ? `${results.parameters.toLocaleString()} parameters; ${duration(results.seconds)} of computing; updates ${size(results.traffic?.up)} up, models ${size(results.traffic?.down)} down.`
      : "",
  ];
  return [
    h("p", null, words.filter(Boolean).join(" ")),
    metrics.length
      ? table("Scores on the test examples, looked at once, at the end", columns, rows, { id: "result-table" })
      : null,
  ];
}
