// The coordinator's log: requests, refusals, runs. Newest first.

import { get } from "./api.js";
import { badge, emptyState, h, panel, renderIfChanged, table } from "./dom.js";
import { inputField, runWithButton, selectField } from "./forms.js";
import { formatTimestamp } from "./format.js";

const TONES = { info: "quiet", warning: "warn", error: "bad" };
const LENGTHS = ["50", "200", "1000"];

export async function logPage() {
  const { section, body } = panel("records", "Records", { wide: true });
  const error = h("p", { class: "error", role: "alert" });
  let records = await get("/api/log?last=200");
  let query = "";

  const draw = () => {
    const matching = [...records].reverse().filter((record) => JSON.stringify(record).toLowerCase().includes(query));
    renderIfChanged(body, [matching, query], () =>
      matching.length
        ? table(
            `${matching.length} of the last ${records.length} records`,
            [{ title: "Time" }, { title: "Level" }, { title: "Event", text: true }, { title: "Details", text: true }],
            matching.map(logRow),
          )
        : emptyState(records.length ? "No record contains this text." : "The log is empty."),
    );
  };
  const search = inputField("search", "Only records that contain", { type: "search" });
  const length = selectField("last", "Number of records", LENGTHS.map((count) => [count, count]), "200");
  const refresh = h("button", { type: "button" }, "Refresh");
  const load = () =>
    runWithButton(refresh, error, async () => {
      records = await get(`/api/log?last=${length.querySelector("select").value}`);
      draw();
    });
  search.querySelector("input").addEventListener("input", (event) => {
    query = event.target.value.trim().toLowerCase();
    draw();
  });
  length.querySelector("select").addEventListener("change", load);
  refresh.addEventListener("click", load);
  draw();
  const controls = h("div", { class: "row controls" }, search, length, h("p", { class: "actions" }, refresh));
  return { title: "Log", nodes: [h("div", { class: "head" }, h("h1", null, "Log")), controls, error, section] };
}

function logRow(record) {
  const { time, level = "info", event, ...fields } = record;
  const details = Object.entries(fields).map(([key, value]) =>
    h(
      "span",
      { class: "pair" },
      h("span", { class: "quiet" }, `${key} `),
      typeof value === "string" ? value : JSON.stringify(value),
    ),
  );
  return [
    formatTimestamp(time),
    badge(TONES[level] ?? "quiet", String(level)),
    event ?? "–",
    { cell: details, class: "text pairs" },
  ];
}
