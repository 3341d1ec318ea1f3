// The page of one run: state and buttons, live round, curves, sites, clusters, privacy, approvals, files, study.

import { get, getOrNull, post, runPath } from "./api.js";
import { clustersBody, withClusters } from "./clusters.js";
import { createCurves } from "./curves.js";
import { announce, h, panel, renderIfChanged } from "./dom.js";
import { runWithButton } from "./forms.js";
import { createPhaseTimer, liveRoundBody } from "./live_round.js";
import { privacyBody, quarantineBody } from "./privacy.js";
import { resultBody } from "./results.js";
import { approvalsBody, crumbs, filesBody, studyBody } from "./run_details.js";
import { runHead } from "./run_head.js";
import { siteTable, trafficBody } from "./run_sites.js";
import { isActive, isTerminal, stateText } from "./run_states.js";
import { listen } from "./stream.js";

const PANEL_TITLES = {
  live: "Current round",
  results: "Result",
  curves: "Curves",
  sites: "Sites",
  clusters: "Clusters",
  privacy: "Privacy",
  quarantine: "Quarantine and refusals",
  traffic: "Traffic",
  approvals: "Approvals",
  files: "Downloads",
  study: "Study",
};
const WIDE_PANELS = ["live", "results", "curves", "sites", "clusters"];
const DRAW_DELAY_MS = 200;

export async function runPage(user, id) {
  let run = await get(runPath(id));
  let live = run.live ?? null;
  let [privacy, files, results] = [null, [], null];
  const recordByRound = new Map();
  const panels = Object.fromEntries(Object.entries(PANEL_TITLES).map(([name, title]) => [name, panel(name, title)]));
  const head = h("div", { class: "run-head" });
  const drawCurves = createCurves(panels.curves);
  const phaseStart = createPhaseTimer();
  let drawTimer = null;
  let closeStream = null;

  const addRecords = (records) => records.forEach((record) => recordByRound.set(record.round, record));
  const sortedRecords = () => [...recordByRound.values()].sort((a, b) => a.round - b.round);
  const requestAction = (action, button, error) =>
    runWithButton(button, error, async () => {
      updateRun(await post(runPath(id, action)));
      startListening();
      draw();
    });

  function updateRun(newRun) {
    const hasNewState = newRun.state !== run.state;
    if (hasNewState) announce(`${newRun.name} is ${newRun.state}. ${stateText(newRun.state)}`);
    run = { ...run, ...newRun };
    if (hasNewState) loadDocuments(); // privacy.json is written when the run begins, results and models when it ends
  }

  async function loadDocuments() {
    [privacy, files, results] = await Promise.all([
      getOrNull(runPath(id, "privacy")),
      getOrNull(runPath(id, "files")),
      isTerminal(run.state) ? getOrNull(runPath(id, "results")) : null,
    ]);
    scheduleDraw();
  }

  async function loadNewRounds() {
    const last = sortedRecords().at(-1)?.round;
    addRecords(await get(runPath(id, "rounds") + (last === undefined ? "" : `?after=${last}`)));
    scheduleDraw();
  }

  /** Draws once for many events. */
  const scheduleDraw = () =>
    (drawTimer ??= setTimeout(() => {
      drawTimer = null;
      draw();
    }, DRAW_DELAY_MS));

  function draw() {
    const records = sortedRecords();
    const lastRound = [records.at(-1)?.round, records.length];
    const siteStates = run.sites.map((site) => [site.site, site.connected, site.approved, site.revoked, site.expires]);
    const report = files?.find((file) => file.kind === "report" && file.path.endsWith(".html"));
    const headKey = [run.state, run.desired_state, run.reason, run.round, run.headline, siteStates, lastRound, report];
    renderIfChanged(head, headKey, () => runHead(run, records, user, requestAction, report));
    const isLive = live && isActive(run.state);
    if (isLive) {
      const startedAt = phaseStart(live);
      drawPanel("live", { ...live, at: startedAt }, () => liveRoundBody(live, startedAt, records));
    }
    drawCurves(records, run.headline);
    const split = run.headline?.split === "test" ? "val" : run.headline?.split;
    const clusterRecords = withClusters(records);
    if (results) drawPanel("results", results, () => resultBody(results));
    drawPanel("sites", [siteStates, lastRound], () => siteTable(run, records, run.headline?.metric, split));
    drawPanel("traffic", lastRound, () => trafficBody(records));
    if (clusterRecords.length) drawPanel("clusters", lastRound, () => clustersBody(clusterRecords));
    drawPanel("privacy", [lastRound, privacy], () => privacyBody(privacy, records, run.study));
    drawPanel("quarantine", lastRound, () => quarantineBody(records));
    drawPanel("approvals", siteStates, () => approvalsBody(run));
    drawPanel("files", files, () => filesBody(run, files));
    drawPanel("study", [run.study, run.study_summary], () => studyBody(run));
    const hasRounds = records.length > 0;
    arrangePanels(panels, {
      live: isLive,
      results,
      curves: hasRounds,
      sites: hasRounds || run.state !== "offered",
      clusters: clusterRecords.length,
      quarantine: hasRounds,
      traffic: hasRounds,
      files: hasRounds || files?.length,
    });
  }

  const drawPanel = (name, key, create) => renderIfChanged(panels[name].body, key, create);

  /** A terminated run sends no events until it is resumed. */
  function startListening() {
    const handlers = {
      run: (newRun) => {
        updateRun(newRun);
        scheduleDraw();
      },
      round: (record) => {
        addRecords([record]);
        scheduleDraw();
      },
      live: (newLive) => {
        live = newLive;
        scheduleDraw();
      },
      end: () => {
        live = null;
        stopListening();
        loadDocuments();
      },
    };
    const path = () => `${runPath(id, "events")}?after=${sortedRecords().at(-1)?.round ?? -1}`;
    closeStream ??= listen(path, handlers, loadNewRounds);
  }
  function stopListening() {
    closeStream?.();
    closeStream = null;
  }

  await Promise.all([loadNewRounds(), loadDocuments()]);
  draw();
  if (!isTerminal(run.state)) startListening();
  const leave = () => {
    stopListening();
    clearTimeout(drawTimer);
  };
  return { title: run.name, nodes: [crumbs(), head, ...Object.values(panels).map(({ section }) => section)], leave };
}

/** Hides panels without content (`present`: name -> whether it has some). Wide tables take the full width, others half. */
function arrangePanels(panels, present) {
  const visible = Object.entries(panels).filter(
    ([name, { section }]) => !(section.hidden = name in present && !present[name]),
  );
  const hasTable = [panels.privacy, panels.quarantine].some(({ body }) => body.querySelector("table"));
  const isWide = (name) => WIDE_PANELS.includes(name) || (hasTable && ["privacy", "quarantine"].includes(name));
  for (const [name, { section }] of visible) section.classList.toggle("wide", isWide(name));
  const halves = visible.filter(([name]) => !isWide(name));
  halves.at(-1)[1].section.classList.toggle("wide", halves.length % 2 === 1);
}
