// One run: its state and buttons, the live round, curves, sites, groups, privacy, approvals, files, the study.

import { find, get, post, runPath as path } from "./api.js";
import { announce, h, panel, show } from "./dom.js";
import { busy } from "./forms.js";
import { curves } from "./curves.js";
import { groupsBody, grouped } from "./groups.js";
import { liveRound, phaseClock } from "./live_round.js";
import { doubtsBody, privacyBody } from "./privacy.js";
import { approvalsBody, crumbs, filesBody, studyBody } from "./run_papers.js";
import { resultBody } from "./results.js";
import { heading } from "./run_head.js";
import { siteTable, traffic } from "./run_sites.js";
import { isLive, isOver, stateWords } from "./states.js";
import { listen } from "./stream.js";

const PARTS = [
  ["live", "This round"],
  ["results", "Result"],
  ["curves", "Curves"],
  ["sites", "Sites"],
  ["groups", "Groups"],
  ["privacy", "Privacy"],
  ["doubts", "Quarantine and refusals"],
  ["traffic", "Traffic"],
  ["approvals", "Approvals"],
  ["files", "Downloads"],
  ["study", "Study"],
];

export async function runPage(me, id) {
  const now = { run: await get(path(id)), rounds: new Map(), live: null, privacy: null, files: [], results: null };
  now.live = now.run.live ?? null;
  const parts = Object.fromEntries(PARTS.map(([name, title]) => [name, panel(name, title)]));
  const head = h("div", { class: "run-head" });
  const drawCurves = curves(parts.curves);
  const began = phaseClock();
  let due = null;
  let stop = null;

  const keep = (records) => records.forEach((record) => now.rounds.set(record.round, record));
  const list = () => [...now.rounds.values()].sort((a, b) => a.round - b.round);
  const act = (action, button, error) =>
    busy(button, error, async () => {
      take(await post(path(id, action)));
      tune();
      draw();
    });

  function take(run) {
    const moved = run.state !== now.run.state;
    if (moved) announce(`${run.name} is ${run.state}. ${stateWords(run.state)}`);
    now.run = { ...now.run, ...run };
    if (moved) readPapers(); // promises are written at the beginning, results and models at the end
  }

  async function readPapers() {
    [now.privacy, now.files, now.results] = await Promise.all([
      find(path(id, "privacy")),
      find(path(id, "files")),
      isOver(now.run.state) ? find(path(id, "results")) : null,
    ]);
    soon();
  }

  async function catchUp() {
    const last = list().at(-1)?.round;
    keep(await get(path(id, "rounds") + (last === undefined ? "" : `?after=${last}`)));
    soon();
  }

  /** Many events, one drawing. */
  const soon = () =>
    (due ??= setTimeout(() => {
      due = null;
      draw();
    }, 200));

  function draw() {
    const { run, live } = now;
    const records = list();
    const last = [records.at(-1)?.round, records.length];
    const states = run.sites.map((site) => [site.site, site.connected, site.approved, site.withdrawn, site.expires]);
    const report = now.files?.find((file) => file.kind === "report" && file.path.endsWith(".html"));
    show(head, [run.state, run.want, run.reason, run.round, run.headline, states, last, report], () =>
      heading(run, records, me, act, report),
    );
    if (live && isLive(run.state))
      show(parts.live.body, { ...live, at: began(live) }, () => liveRound(live, began(live), records));
    drawCurves(records, run.headline);
    const split = run.headline?.split === "test" ? "val" : run.headline?.split;
    const groups = grouped(records);
    if (now.results) show(parts.results.body, now.results, () => resultBody(now.results));
    show(parts.sites.body, [states, last], () => siteTable(run, records, run.headline?.metric, split));
    show(parts.traffic.body, last, () => traffic(records));
    if (groups.length) show(parts.groups.body, last, () => groupsBody(records));
    show(parts.privacy.body, [last, now.privacy], () => privacyBody(now.privacy, records, run.study));
    show(parts.doubts.body, last, () => doubtsBody(records));
    show(parts.approvals.body, states, () => approvalsBody(run));
    show(parts.files.body, now.files, () => filesBody(run, now.files));
    show(parts.study.body, [run.study, run.about], () => studyBody(run));
    const ran = records.length > 0;
    arrange(parts, {
      live: live && isLive(run.state),
      results: now.results,
      curves: ran,
      sites: ran || run.state !== "offered",
      groups: groups.length,
      doubts: ran,
      traffic: ran,
      files: ran || now.files?.length,
    });
  }

  /** Listens unless it does already; a run that is over has nothing to tell until somebody resumes it. */
  function tune() {
    stop ??= listen(
      () => `${path(id, "events")}?after=${list().at(-1)?.round ?? -1}`,
      {
        run: (run) => {
          take(run);
          soon();
        },
        round: (record) => {
          keep([record]);
          soon();
        },
        live: (live) => {
          now.live = live;
          soon();
        },
        end: () => {
          now.live = null;
          hush();
          readPapers();
        },
      },
      catchUp,
    );
  }
  function hush() {
    stop?.();
    stop = null;
  }

  await Promise.all([catchUp(), readPapers()]);
  draw();
  if (!isOver(now.run.state)) tune();
  const leave = () => {
    hush();
    clearTimeout(due);
  };
  return { title: now.run.name, nodes: [crumbs(), head, ...Object.values(parts).map((part) => part.section)], leave };
}

/** What has nothing to say is hidden; tables of many columns take the whole width, the others stand in pairs. */
function arrange(parts, present) {
  const there = Object.entries(parts).filter(
    ([name, { section }]) => !(section.hidden = name in present && !present[name]),
  );
  const told = [parts.privacy, parts.doubts].some(({ body }) => body.querySelector("table"));
  const wide = ([name]) =>
    ["live", "results", "curves", "sites", "groups"].includes(name) || (told && ["privacy", "doubts"].includes(name));
  for (const part of there) part[1].section.classList.toggle("wide", Boolean(wide(part)));
  const halves = there.filter((part) => !wide(part));
  halves.at(-1)[1].section.classList.toggle("wide", halves.length % 2 === 1);
}
