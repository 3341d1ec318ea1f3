// The head of a run's page: name and state, buttons, and five numbers.

import { filePath } from "./api.js";
import { confirmAction } from "./dialogs.js";
import { h } from "./dom.js";
import { elapsedSeconds, formatBytes, formatDateTime, formatDuration } from "./format.js";
import { trafficTotals } from "./run_sites.js";
import {
  approvedSites,
  connectedSites,
  headlineScore,
  progressBar,
  runButtons,
  stateBadge,
  stateText,
} from "./run_states.js";
import { elapsedTime } from "./times.js";

/** `requestAction(action, button, error)` asks the coordinator; `report`: the HTML report, if it has been written. */
export function runHead(run, records, user, requestAction, report) {
  const error = h("p", { class: "error", role: "alert" });
  const buttons = runButtons(run, user.role);
  const reasons = [...new Set(buttons.map((button) => button.disabledReason).filter(Boolean))];
  const onPress = async (button, node) => {
    if (button.disabledReason) return;
    if (button.action === "stop" && !(await confirmStop(run))) return;
    await requestAction(button.action, document.getElementById(node.id) ?? node, error);
  };
  const buttonNodes = buttons.map((button) =>
    h(
      "button",
      {
        type: "button",
        id: `do-${button.action}`,
        class: button.kind,
        "aria-disabled": button.disabledReason ? "true" : null,
        "aria-describedby": button.disabledReason ? "disabled-reason" : null,
        onclick: (event) => onPress(button, event.currentTarget),
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
          ` ${stateText(run.state)} `,
          h("span", { class: "quiet" }, `${run.strategy} · ${run.id}`),
        ),
      ),
      h(
        "div",
        null,
        h("p", { class: "actions" }, report && reportLink(run, report), buttonNodes),
        reasons.length ? h("p", { class: "quiet reason", id: "disabled-reason" }, reasons.join(" ")) : null,
        error,
      ),
    ),
    run.reason && h("p", { class: `notice ${run.state === "failed" ? "bad" : ""}` }, run.reason),
    tiles(run, records),
  ];
}

const confirmStop = (run) =>
  confirmAction(
    `Stop ${run.name}?`,
    [
      "The current round is finished, then the run ends: no more rounds, no more privacy budget spent.",
      "The models of the best round so far are saved.",
    ],
    "Stop the run",
  );

const reportLink = (run, report) =>
  h(
    "a",
    { class: "button main", id: "report", href: filePath(run.id, report.path), target: "_blank", rel: "noopener" },
    "Open the report",
  );

function tiles(run, records) {
  const totals = trafficTotals(records);
  const tile = (name, ...value) => h("div", null, h("dt", null, name), h("dd", null, value));
  const time = !run.started
    ? "not started"
    : run.finished
      ? [
          formatDuration(elapsedSeconds(run.started, run.finished)),
          h("small", null, `ended ${formatDateTime(run.finished)}`),
        ]
      : [elapsedTime(run.started), h("small", null, `since ${formatDateTime(run.started)}`)];
  return h(
    "dl",
    { class: "tiles" },
    tile("Round", progressBar(run)),
    tile("Score", headlineScore(run)),
    tile(
      "Sites",
      `${connectedSites(run).length} of ${run.sites.length}`,
      h("small", null, `connected, ${approvedSites(run).length} approved`),
    ),
    tile("Traffic", h("span", null, "↑ ", formatBytes(totals.up)), h("small", null, `↓ ${formatBytes(totals.down)}`)),
    tile("Time", time),
  );
}
