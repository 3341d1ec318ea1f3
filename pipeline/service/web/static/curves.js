// Learning curves: the selected metric and the loss, over all sites and per site; also as a table.

import { finitePoints, lineChart } from "./chart.js";
import { emptyState, h, renderIfChanged, table } from "./dom.js";
import { selectField } from "./forms.js";
import { formatScore, formatTick, isNumber, isPercentMetric, metricName, splitName } from "./format.js";

const MAX_TABLE_ROWS = 200; // longer tables would make the page slow
const NUM_COLORS = 8;

/** Returns a function that draws the curves into the panel. */
export function createCurves(panel) {
  const controls = h("div", { class: "row controls" });
  const figures = h("div", { class: "chart-pair" });
  const tableBox = h("div");
  const details = h("details", { id: "curves-table" }, h("summary", null, "Show as table"), tableBox);
  panel.body.append(controls, figures, details);
  const selected = { metric: null, split: null };
  let lastArguments = null;

  function draw(records, headline) {
    lastArguments = [records, headline];
    const evaluated = records.filter((record) => Object.keys(record.metrics ?? {}).length);
    if (!evaluated.length) {
      renderIfChanged(figures, "none", () =>
        emptyState("No round has been evaluated yet.", "The curves begin with the first evaluated round."),
      );
      details.hidden = true;
      return;
    }
    details.hidden = false;
    const splits = [...new Set(evaluated.flatMap((record) => Object.keys(record.metrics)))];
    const split = splits.includes(selected.split) ? selected.split : splits.includes("val") ? "val" : splits[0];
    const metrics = metricNames(evaluated, split);
    const metric = [selected.metric, headline?.metric, "accuracy"].find((name) => metrics.includes(name)) ?? metrics[0];
    renderIfChanged(controls, [metrics, splits], () => selectFields(metrics, metric, splits, split));
    const sites = [...new Set(evaluated.flatMap((record) => Object.keys(record.metrics[split]?.sites ?? {})))].sort();
    const key = [evaluated.at(-1).round, evaluated.length, metric, split];
    renderIfChanged(figures, key, () =>
      [...new Set([metric, "loss"])].map((name) => metricChart(evaluated, sites, split, name)),
    );
    if (details.open) renderIfChanged(tableBox, key, () => valueTable(evaluated, sites, split, metric));
  }

  function selectFields(metrics, metric, splits, split) {
    const select = (key) => (event) => {
      selected[key] = event.target.value;
      draw(...lastArguments);
    };
    const metricOptions = metrics.map((name) => [name, metricName(name)]);
    const metricField = selectField("metric", "Metric", metricOptions, metric);
    metricField.querySelector("select").addEventListener("change", select("metric"));
    if (splits.length < 2) return [metricField];
    const splitOptions = splits.map((name) => [name, splitName(name)]);
    const splitField = selectField("split", "Examples", splitOptions, split);
    splitField.querySelector("select").addEventListener("change", select("split"));
    return [metricField, splitField];
  }

  details.addEventListener("toggle", () => lastArguments && draw(...lastArguments));
  return draw;
}

const overallMetrics = (record, split) => record.metrics[split]?.pooled ?? record.metrics[split]?.coordinator ?? {};
const metricNames = (evaluated, split) =>
  Object.entries(overallMetrics(evaluated.at(-1), split))
    .filter(([name, value]) => name !== "n" && isNumber(value))
    .map(([name]) => name);

function metricChart(evaluated, sites, split, metric) {
  const line = (name, kind, color, metricsOf) => ({
    name,
    kind,
    color,
    points: finitePoints(evaluated.map((record) => [record.round, metricsOf(record)?.[metric]])),
  });
  const isCrowded = sites.length > NUM_COLORS;
  const overallName = evaluated.at(-1).metrics[split]?.pooled ? "all sites" : "coordinator";
  const lines = [
    ...sites.map((site, index) =>
      line(site, "site", isCrowded ? "many" : `c${index}`, (record) => record.metrics[split]?.sites?.[site]),
    ),
    line(overallName, "pooled", "main", (record) => overallMetrics(record, split)),
  ].filter(({ points }) => points.length);
  const overall = lines.at(-1);
  const [first, last] = [overall?.points[0], overall?.points.at(-1)];
  const desc = overall
    ? `${overall.name}: ${formatScore(metric, first[1])} in round ${first[0]}, ${formatScore(metric, last[1])} in round ${last[0]}; ${sites.length} sites as thin lines.`
    : "no values";
  return lineChart({
    id: `chart-${metric}`,
    title: `${metricName(metric)}, ${splitName(split)}`,
    desc,
    lines,
    format: isPercentMetric(metric) ? (tick, step) => `${formatTick(100 * tick, 100 * step)} %` : formatTick,
    exact: (value) => formatScore(metric, value),
    from: metric === "loss" ? 0 : undefined,
  });
}

function valueTable(evaluated, sites, split, metric) {
  const records = evaluated.slice(-MAX_TABLE_ROWS).reverse();
  const columns = [
    { title: "Round" },
    { title: "All", number: true },
    ...sites.map((site) => ({ title: site, number: true })),
  ];
  const rows = records.map((record) => [
    String(record.round),
    formatScore(metric, overallMetrics(record, split)[metric]),
    ...sites.map((site) => formatScore(metric, record.metrics[split]?.sites?.[site]?.[metric])),
  ]);
  const limit = evaluated.length > records.length ? `, last ${records.length} rounds` : "";
  const caption = `${metricName(metric)}, ${splitName(split)}, newest round first${limit}`;
  return table(caption, columns, rows, { stacks: false });
}
