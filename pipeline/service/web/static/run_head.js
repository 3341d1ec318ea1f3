// The head of a run's page: its name and state, the buttons, and five numbers.

import { filePath } from "./api.js";
import { confirmed } from "./dialogs.js";
import { h } from "./dom.js";
import { totals } from "./run_sites.js";
import { approvals, buttonsFor, connected, headline, progress, stateBadge, stateWords } from "./states.js";
import { running } from "./times.js";
import { duration, elapsed, moment, size } from "./words.js";

/** `act(action, button, error)` asks the coordinator; `report`: the file, if there is one. */
export function heading(run, records, me, act, report) {
  const error = h("p", { class: "error", role: "alert" });
  const buttons = buttonsFor(run, me.role);
  const reasons = [...new Set(buttons.map((button) => button.why).filter(Boolean))];
  const press = async (button, node) => {
    if (button.why) return;
    if (
      button.action === "stop" &&
      !(await confirmed(
        `Stop ${run.name}?`,
        [
          "The round under way is finished, then the run ends: no more rounds, no more privacy spent.",
          "The models of the best round so far are kept.",
        ],
        "Stop the run",
      ))
    )
      return;
    await act(button.action, document.getElementById(node.id) ?? node, error);
  };
  const drawn = buttons.map((button) =>
    h(
      "button",
      {
        type: "button",
        id: `do-${button.action}`,
        class: button.kind,
        "aria-disabled": button.why ? "true" : null,
        "aria-describedby": button.why ? "why-not" : null,
        onclick: (event) => press(button, event.currentTarget),
      },
      button.label,
    ),
  );
  return [
    h(
      "div",
      { class: "head" },
      h(
        "div",
        null,
        h("h1", { tabindex: "-1" }, run.name),
        h(
          "p",
          { class: "subtitle" },
          stateBadge(run.state),
          ` ${stateWords(run.state)} `,
          h("span", { class: "quiet" }, `${run.strategy} · ${run.id}`),
        ),
      ),
      h(
        "div",
        null,
        h(
          "p",
          { class: "actions" },
          report &&
            h(
              "a",
              {
                class: "button main",
                id: "report",
                href: filePath(run.id, report.path),
                target: "_blank",
                rel: "noopener",
              },
              "Open the report",
            ),
          drawn,
        ),
        reasons.length ? h("p", { class: "quiet why", id: "why-not" }, reasons.join(" ")) : null,
        error,
      ),
    ),
    run.reason && h("p", { class: `notice ${run.state === "failed" ? "bad" : ""}` }, run.reason),
    tiles(run, records),
  ];
}

function tiles(run, records) {
  const sum = totals(records);
  const tile = (name, ...value) => h("div", null, h("dt", null, name), h("dd", null, value));
  const time = !run.started
    ? "not yet"
    : run.finished
      ? [duration(elapsed(run.started, run.finished)), h("small", null, `ended ${moment(run.finished)}`)]
      : [running(run.started), h("small", null, `since ${moment(run.started)}`)];
  return h(
    "dl",
    { class: "tiles" },
    tile("Round", progress(run)),
    tile("Score", headline(run)),
    tile(
      "Sites",
      `${connected(run).length} of ${run.sites.length}`,
      h("small", null, `connected, ${approvals(run).length} approved`),
    ),
    tile("Traffic", h("span", null, "↑ ", size(sum.allUp)), h("small", null, `↓ ${size(sum.allDown)}`)),
    tile("Time", time),
  );
}
