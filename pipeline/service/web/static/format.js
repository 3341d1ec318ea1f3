// Formats numbers and times. Names of metrics and units are those of the reports.

const METRICS = {
  accuracy: "Accuracy",
  balanced_accuracy: "Balanced accuracy",
  macro_f1: "Macro F1",
  auroc: "AUROC",
  auprc: "AUPRC",
  positive_auroc: "AUROC, positive class",
  positive_auprc: "AUPRC, positive class",
  loss: "Loss",
  sensitivity_at_specificity: "Sensitivity at fixed specificity",
  calibration_error: "Calibration error",
};
const PERCENT_METRICS = new Set(["accuracy", "balanced_accuracy", "sensitivity_at_specificity"]);
const SPLITS = { val: "validation", test: "test", train: "training" };
export const MISSING = "–";

export const metricName = (name) => METRICS[name] ?? capitalize(name.replaceAll("_", " "));
export const splitName = (name) => SPLITS[name] ?? name;
export const isPercentMetric = (name) => PERCENT_METRICS.has(name);
export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const capitalize = (text) => text.charAt(0).toUpperCase() + text.slice(1);
/** For use within a sentence; acronyms stay. */
export const uncapitalize = (text) => (/^[A-Z]{2}/.test(text) ? text : text.charAt(0).toLowerCase() + text.slice(1));
export const truncate = (text, length = 18) => (text.length <= length ? text : `${text.slice(0, length - 1)}…`);

export function joinNames(names) {
  return names.length < 2 ? (names[0] ?? "") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}

export const formatCount = (value) => (isNumber(value) ? Math.round(value).toLocaleString() : MISSING);
/** "1 site", "2 sites". */
export const formatCountOf = (count, noun) => `${formatCount(count)} ${noun}${count === 1 ? "" : "s"}`;

export function formatScore(metric, value) {
  if (!isNumber(value)) return MISSING;
  return isPercentMetric(metric) ? `${(100 * value).toFixed(1)} %` : value.toFixed(3);
}

/** With as many decimals as ticks at this distance need. */
export function formatTick(tick, step) {
  const digits =
    [0, 1, 2, 3].find((count) => Math.abs(step * 10 ** count - Math.round(step * 10 ** count)) < 1e-6) ?? 4;
  return tick.toFixed(digits);
}

/** All ticks of an axis in the unit of the highest. */
export function formatBytesTick(tick, step, highest) {
  const [size, unit] = [
    [1e12, "TB"],
    [1e9, "GB"],
    [1e6, "MB"],
    [1e3, "kB"],
  ].find(([candidate]) => highest >= candidate) ?? [1, "B"];
  return tick ? `${formatTick(tick / size, step / size)} ${unit}` : "0";
}

/** In decimal units: 1 kB is 1000 bytes. */
export function formatBytes(bytes) {
  if (!isNumber(bytes)) return MISSING;
  if (bytes < 1000) return `${Math.round(bytes)} B`;
  let value = bytes;
  for (const unit of ["kB", "MB", "GB"]) {
    value /= 1000;
    if (value < 999.95) return `${value.toFixed(1)} ${unit}`;
  }
  return `${(value / 1000).toFixed(1)} TB`;
}

export function formatDuration(seconds) {
  if (!isNumber(seconds)) return MISSING;
  if (seconds > 0 && seconds < 0.095) return "< 0.1 s";
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(Math.round(seconds) / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.round(seconds) % 60).padStart(2, "0")} s`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(minutes / 1440)} days`;
}

const RELATIVE_FORMAT = new Intl.RelativeTimeFormat(undefined, { numeric: "auto" });
// upper limit in seconds, unit, seconds per unit
const RELATIVE_UNITS = [
  [60, "second", 1],
  [3600, "minute", 60],
  [86400, "hour", 3600],
  [Infinity, "day", 86400],
];

/** "3 minutes ago", in the reader's language. */
export function formatTimeAgo(iso) {
  const seconds = (Date.parse(iso) - Date.now()) / 1000;
  if (!Number.isFinite(seconds)) return MISSING;
  if (Math.abs(seconds) < 10) return seconds > 0 ? "in a moment" : "just now";
  const [, unit, unitSeconds] = RELATIVE_UNITS.find(([limit]) => Math.abs(seconds) < limit);
  return RELATIVE_FORMAT.format(Math.trunc(seconds / unitSeconds), unit);
}

const DATE_TIME_FORMAT = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
const TIMESTAMP_FORMAT = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "medium" });
const formatWith = (format) => (iso) =>
  Number.isNaN(Date.parse(iso ?? "")) ? MISSING : format.format(new Date(iso));
export const formatDateTime = formatWith(DATE_TIME_FORMAT);
/** With seconds. */
export const formatTimestamp = formatWith(TIMESTAMP_FORMAT);
/** Until now without `to`. */
export const elapsedSeconds = (from, to) =>
  (Date.parse(to ?? new Date().toISOString()) - Date.parse(from)) / 1000;

/** Round numbers 1, 2, 3, 7 as "1–3, 7". */
export function formatRanges(rounds) {
  const ranges = [];
  for (const round of [...rounds].sort((a, b) => a - b)) {
    const last = ranges.at(-1);
    if (last && round === last[1] + 1) last[1] = round;
    else ranges.push([round, round]);
  }
  return ranges.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ");
}
