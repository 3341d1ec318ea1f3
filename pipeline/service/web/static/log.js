// What the coordinator has noted: requests, refusals, runs. The newest first.

import { get } from "./api.js";
import { badge, empty, h, panel, show, table } from "./dom.js";
import { busy, choice, field } from "./forms.js";
import { toTheSecond } from "./words.js";

const TONES = { info: "quiet", warning: "warn", error: "bad" };
const LENGTHS = [
  ["50", "50"],
  ["200", "200"],
  ["1000", "1000"],
];

export async function logPage() {
  const { section, body } = panel("records", "Records", { wide: true });
  const error = h("p", { class: "error", role: "alert" });
  let records = await get("/api/log?last=200");
  let wanted = "";

  const draw = () => {
    const fitting = [...records].reverse().filter((record) => JSON.stringify(record).toLowerCase().includes(wanted));
    show(body, [fitting, wanted], () =>
      fitting.length
        ? table(
            `${fitting.length} of the last ${records.length} records`,
            [{ title: "Time" }, { title: "Level" }, { title: "Event", words: true }, { title: "Details", words: true }],
            fitting.map(row),
          )
        : empty(records.length ? "No record has these words." : "Nothing has been noted yet."),
    );
  };
  const search = field("words", "Only with these words", { type: "search" });
  const length = choice("last", "How many", LENGTHS, "200");
  const again = h("button", { type: "button", class: "plain" }, "Read again");
  const read = () =>
    busy(again, error, async () => {
      records = await get(`/api/log?last=${length.querySelector("select").value}`);
      draw();
    });
  search.querySelector("input").addEventListener("input", (event) => {
    wanted = event.target.value.trim().toLowerCase();
    draw();
  });
  length.querySelector("select").addEventListener("change", read);
  again.addEventListener("click", read);
  draw();
  const controls = h("div", { class: "row controls" }, search, length, h("p", { class: "actions" }, again));
  return { title: "Log", nodes: [h("div", { class: "head" }, h("h1", null, "Log")), controls, error, section] };
}

function row(record) {
  const { time, level = "info", event, ...rest } = record;
  const details = Object.entries(rest).map(([key, value]) =>
    h(
      "span",
      { class: "pair" },
      h("span", { class: "quiet" }, `${key} `),
      typeof value === "string" ? value : JSON.stringify(value),
    ),
  );
  return [
    toTheSecond(time),
    badge(TONES[level] ?? "quiet", String(level)),
    event ?? "–",
    { cell: details, class: "words pairs" },
  ];
}
