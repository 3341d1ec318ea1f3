// How the model learns: one chosen metric and the loss, pooled and per site, and the same as a table.

import { chart, defined } from "./chart.js";
import { empty, h, show, table } from "./dom.js";
import { choice } from "./forms.js";
import { isNumber, isPercent, metricName, score, splitName, tickWords } from "./words.js";

const TABLE_ROUNDS = 200; // the last so many; more would stall a page
const SHADES = 8;

export function curves(panel) {
  const controls = h("div", { class: "row controls" });
  const figures = h("div", { class: "pair-of-charts" });
  const body = h("div");
  const details = h("details", { id: "curves-table" }, h("summary", null, "Show as table"), body);
  panel.body.append(controls, figures, details);
  const chosen = { metric: null, split: null };
  let latest = null;

  function draw(records, headline) {
    latest = [records, headline];
    const judged = records.filter((record) => Object.keys(record.metrics ?? {}).length);
    if (!judged.length) {
      show(figures, "none", () => empty("Nothing has been judged yet.", "The curves begin with the first round."));
      details.hidden = true;
      return;
    }
    details.hidden = false;
    const splits = [...new Set(judged.flatMap((record) => Object.keys(record.metrics)))];
    const split = splits.includes(chosen.split) ? chosen.split : splits.includes("val") ? "val" : splits[0];
    const metrics = metricsOf(judged, split);
    const metric = [chosen.metric, headline?.metric, "accuracy"].find((name) => metrics.includes(name)) ?? metrics[0];
    show(controls, [metrics, splits], () => pickers(metrics, metric, splits, split));
    const sites = [...new Set(judged.flatMap((record) => Object.keys(record.metrics[split]?.sites ?? {})))].sort();
    show(figures, [judged.at(-1).round, judged.length, metric, split], () =>
      [...new Set([metric, "loss"])].map((name) => figure(judged, sites, split, name)),
    );
    if (details.open)
      show(body, [judged.at(-1).round, judged.length, metric, split], () => valueTable(judged, sites, split, metric));
  }

  function pickers(metrics, metric, splits, split) {
    const pick = (key) => (event) => {
      chosen[key] = event.target.value;
      draw(...latest);
    };
    const one = choice(
      "metric",
      "Metric",
      metrics.map((name) => [name, metricName(name)]),
      metric,
    );
    one.querySelector("select").addEventListener("change", pick("metric"));
    if (splits.length < 2) return [one];
    const two = choice(
      "split",
      "Examples",
      splits.map((name) => [name, splitName(name)]),
      split,
    );
    two.querySelector("select").addEventListener("change", pick("split"));
    return [one, two];
  }

  details.addEventListener("toggle", () => latest && draw(...latest));
  return draw;
}

const whole = (record, split) => record.metrics[split]?.pooled ?? record.metrics[split]?.coordinator ?? {};
const metricsOf = (judged, split) =>
  Object.entries(whole(judged.at(-1), split))
    .filter(([name, value]) => name !== "n" && isNumber(value))
    .map(([name]) => name);

function figure(judged, sites, split, metric) {
  const line = (name, kind, shade, of) => ({
    name,
    kind,
    shade,
    points: defined(judged.map((record) => [record.round, of(record)?.[metric]])),
  });
  const many = sites.length > SHADES;
  const lines = [
    ...sites.map((site, place) =>
      line(site, "site", many ? "many" : `c${place}`, (record) => record.metrics[split]?.sites?.[site]),
    ),
    line(judged.at(-1).metrics[split]?.pooled ? "all sites" : "coordinator", "pooled", "main", (record) =>
      whole(record, split),
    ),
  ].filter((one) => one.points.length);
  const main = lines.at(-1);
  const [from, to] = [main?.points[0], main?.points.at(-1)];
  const desc = main
    ? `${main.name}: ${score(metric, from[1])} in round ${from[0]}, ${score(metric, to[1])} in round ${to[0]}; ${sites.length} sites as thin lines.`
    : "no values";
  const title = `${metricName(metric)}, ${splitName(split)}`;
  return chart({
    id: `chart-${metric}`,
    title,
    desc,
    lines,
    format: isPercent(metric) ? (tick, step) => `${tickWords(100 * tick, 100 * step)} %` : tickWords,
    exact: (value) => score(metric, value),
    from: metric === "loss" ? 0 : undefined,
  });
}

function valueTable(judged, sites, split, metric) {
  const shown = judged.slice(-TABLE_ROUNDS).reverse();
  const columns = [
    { title: "Round" },
    { title: "All", number: true },
    ...sites.map((site) => ({ title: site, number: true })),
  ];
  const rows = shown.map((record) => [
    String(record.round),
    score(metric, whole(record, split)[metric]),
    ...sites.map((site) => score(metric, record.metrics[split]?.sites?.[site]?.[metric])),
  ]);
  const left = judged.length > shown.length ? `, the last ${shown.length} rounds` : "";
  return table(`${metricName(metric)}, ${splitName(split)}, the newest round first${left}`, columns, rows, {
    stacks: false,
  });
}
