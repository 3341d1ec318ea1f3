// Numbers and times as people read them. Names of metrics and units are those of the report pages.

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
const PERCENT = new Set(["accuracy", "balanced_accuracy", "sensitivity_at_specificity"]);
const SPLITS = { val: "validation", test: "test", train: "training" };
export const NOTHING = "–";

export const metricName = (name) => METRICS[name] ?? capital(name.replaceAll("_", " "));
export const splitName = (name) => SPLITS[name] ?? name;
export const isPercent = (name) => PERCENT.has(name);
export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
export const inText = (name) => (/^[A-Z]{2}/.test(name) ? name : name.charAt(0).toLowerCase() + name.slice(1));
export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
export const whole = (value) => (isNumber(value) ? Math.round(value).toLocaleString() : NOTHING);
export const countOf = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

export function score(name, value) {
  if (!isNumber(value)) return NOTHING;
  return PERCENT.has(name) ? `${(100 * value).toFixed(1)} %` : value.toFixed(3);
}

/** As many decimals as tell ticks of this step apart. */
export function tickWords(tick, step) {
  const places =
    [0, 1, 2, 3].find((digits) => Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) < 1e-6) ?? 4;
  return tick.toFixed(places);
}

/** All ticks in the unit of the highest. */
export function sizeTick(tick, step, highest) {
  const [unit, name] = [
    [1e12, "TB"],
    [1e9, "GB"],
    [1e6, "MB"],
    [1e3, "kB"],
    [1, "B"],
  ].find(([least]) => highest >= least) ?? [1, "B"];
  return tick ? `${tickWords(tick / unit, step / unit)} ${name}` : "0";
}

/** Decimal units, as networks are billed. */
export function size(bytes) {
  if (!isNumber(bytes)) return NOTHING;
  if (bytes < 1000) return `${Math.round(bytes)} B`;
  let rest = bytes;
  for (const unit of ["kB", "MB", "GB"]) {
    rest /= 1000;
    if (rest < 999.95) return `${rest.toFixed(1)} ${unit}`;
  }
  return `${(rest / 1000).toFixed(1)} TB`;
}

export function duration(seconds) {
  if (!isNumber(seconds)) return NOTHING;
  if (seconds > 0 && seconds < 0.095) return "< 0.1 s";
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(Math.round(seconds) / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.round(seconds) % 60).padStart(2, "0")} s`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(minutes / 1440)} days`;
}

const RELATIVE = new Intl.RelativeTimeFormat(undefined, { numeric: "auto" });
const STEPS = [
  [60, "second", 1],
  [3600, "minute", 60],
  [86400, "hour", 3600],
  [Infinity, "day", 86400],
];

/** "3 minutes ago", in the reader's language. */
export function ago(iso) {
  const seconds = (Date.parse(iso) - Date.now()) / 1000;
  if (!Number.isFinite(seconds)) return NOTHING;
  if (Math.abs(seconds) < 10) return seconds > 0 ? "in a moment" : "just now";
  const [, unit, length] = STEPS.find(([limit]) => Math.abs(seconds) < limit);
  return RELATIVE.format(Math.trunc(seconds / length), unit);
}

const MOMENT = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
const SECOND = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "medium" });
const clock = (format) => (iso) => (Number.isNaN(Date.parse(iso ?? "")) ? NOTHING : format.format(new Date(iso)));
export const moment = clock(MOMENT);
export const toTheSecond = clock(SECOND);
export const elapsed = (from, to) => (Date.parse(to ?? new Date().toISOString()) - Date.parse(from)) / 1000;

/** 1, 2, 3, 7 -> 1–3, 7 */
export function ranges(turns) {
  const found = [];
  for (const turn of [...turns].sort((a, b) => a - b)) {
    const last = found.at(-1);
    if (last && turn === last[1] + 1) last[1] = turn;
    else found.push([turn, turn]);
  }
  return found.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ");
}

export function joined(names) {
  return names.length < 2 ? (names[0] ?? "") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}

export const shorten = (text, length = 18) => (text.length <= length ? text : `${text.slice(0, length - 1)}…`);
