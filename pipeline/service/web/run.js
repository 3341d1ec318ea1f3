// One run: its state and buttons, the live round, curves, sites, groups, privacy, approvals, files, the study.

import { filePath, find, get, post, runPath as path } from "./api.js";
import { announce, h, panel, show } from "./dom.js";
import { confirmed } from "./dialogs.js";
import { busy } from "./forms.js";
import { curves } from "./curves.js";
import { groupsBody, grouped } from "./groups.js";
import { liveRound, phaseClock } from "./live_round.js";
import { doubtsBody, privacyBody } from "./privacy.js";
import { approvalsBody, crumbs, filesBody, studyBody } from "./run_papers.js";
import { resultBody } from "./results.js";
import { siteTable, totals, traffic } from "./run_sites.js";
import { approvals, buttonsFor, connected, headline, isLive, isOver, progress, stateBadge, stateWords } from "./states.js";
import { listen } from "./stream.js";
import { running } from "./times.js";
import { duration, elapsed, moment, size } from "./words.js";

const PARTS = [
  ["live", "This round"], ["results", "Result"], ["curves", "Curves"], ["sites", "Sites"], ["groups", "Groups"], ["privacy", "Privacy"],
  ["doubts", "Quarantine and refusals"], ["traffic", "Traffic"], ["approvals", "Approvals"], ["files", "Downloads"], ["study", "Study"],
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
  const act = (action, button, error) => busy(button, error, async () => {
    take(await post(path(id, action)));
    tune();
    draw();
  });

  function take(run) {
    if (run.state !== now.run.state) announce(`${run.name} is ${run.state}. ${stateWords(run.state)}`);
    const ended = isOver(run.state) && !isOver(now.run.state);
    now.run = { ...now.run, ...run };
    if (ended) readPapers();
  }

  async function readPapers() {
    [now.privacy, now.files, now.results] = await Promise.all([find(path(id, "privacy")), find(path(id, "files")), isOver(now.run.state) ? find(path(id, "results")) : null]);
    soon();
  }

  async function catchUp() {
    const last = list().at(-1)?.round;
    keep(await get(path(id, "rounds") + (last === undefined ? "" : `?after=${last}`)));
    soon();
  }

  /** Many events, one drawing. */
  const soon = () => (due ??= setTimeout(() => { due = null; draw(); }, 200));

  function draw() {
    const { run, live } = now;
    const records = list();
    const last = [records.at(-1)?.round, records.length];
    const states = run.sites.map((site) => [site.site, site.connected, site.approved, site.withdrawn, site.expires]);
    const report = now.files?.find((file) => file.kind === "report" && file.path.endsWith(".html"));
    show(head, [run.state, run.want, run.reason, run.round, run.headline, states, last, report], () => heading(run, records, me, act, report));
    if (live && isLive(run.state)) show(parts.live.body, { ...live, at: began(live) }, () => liveRound(live, began(live), records));
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
    arrange(parts, { live: live && isLive(run.state), results: now.results, curves: ran, sites: ran || run.state !== "offered", groups: groups.length, doubts: ran, traffic: ran, files: ran || now.files?.length });
  }

  /** Listens unless it does already; a run that is over has nothing to tell until somebody resumes it. */
  function tune() {
    stop ??= listen(() => `${path(id, "events")}?after=${list().at(-1)?.round ?? -1}`, {
      run: (run) => { take(run); soon(); },
      round: (record) => { keep([record]); soon(); },
      live: (live) => { now.live = live; soon(); },
      end: () => { now.live = null; hush(); readPapers(); },
    }, catchUp);
  }
  function hush() {
    stop?.();
    stop = null;
  }

  await Promise.all([catchUp(), readPapers()]);
  draw();
  if (!isOver(now.run.state)) tune();
  const leave = () => { hush(); clearTimeout(due); };
  return { title: now.run.name, nodes: [crumbs(), head, ...Object.values(parts).map((part) => part.section)], leave };
}

/** What has nothing to say is hidden; tables of many columns take the whole width, the others stand in pairs. */
function arrange(parts, present) {
  const there = Object.entries(parts).filter(([name, { section }]) => !(section.hidden = name in present && !present[name]));
  const told = [parts.privacy, parts.doubts].some(({ body }) => body.querySelector("table"));
  const wide = ([name]) => ["live", "results", "curves", "sites", "groups"].includes(name) || (told && ["privacy", "doubts"].includes(name));
  for (const part of there) part[1].section.classList.toggle("wide", Boolean(wide(part)));
  const halves = there.filter((part) => !wide(part));
  halves.at(-1)[1].section.classList.toggle("wide", halves.length % 2 === 1);
}

function heading(run, records, me, act, report) {
  const error = h("p", { class: "error", role: "alert" });
  const buttons = buttonsFor(run, me.role);
  const reasons = [...new Set(buttons.map((button) => button.why).filter(Boolean))];
  const press = async (button, node) => {
    if (button.why) return;
    if (button.action === "stop" && !(await confirmed(`Stop ${run.name}?`, ["The round under way is finished, then the run ends: no more rounds, no more privacy spent.", "The models of the best round so far are kept."], "Stop the run"))) return;
    await act(button.action, document.getElementById(node.id) ?? node, error);
  };
  const drawn = buttons.map((button) => h("button", {
    type: "button", id: `do-${button.action}`, class: button.kind, "aria-disabled": button.why ? "true" : null, "aria-describedby": button.why ? "why-not" : null, onclick: (event) => press(button, event.currentTarget),
  }, button.label));
  return [
    h("div", { class: "head" },
      h("div", null, h("h1", { tabindex: "-1" }, run.name), h("p", { class: "subtitle" }, stateBadge(run.state), ` ${stateWords(run.state)} `, h("span", { class: "quiet" }, `${run.strategy} · ${run.id}`))),
      h("div", null, h("p", { class: "actions" }, report && h("a", { class: "button main", id: "report", href: filePath(run.id, report.path), target: "_blank", rel: "noopener" }, "Open the report"), drawn), reasons.length ? h("p", { class: "quiet why", id: "why-not" }, reasons.join(" ")) : null, error)),
    run.reason && h("p", { class: `notice ${run.state === "failed" ? "bad" : ""}` }, run.reason),
    tiles(run, records),
  ];
}

function tiles(run, records) {
  const sum = totals(records);
  const tile = (name, ...value) => h("div", null, h("dt", null, name), h("dd", null, value));
  const time = !run.started ? "not yet" : run.finished ? [duration(elapsed(run.started, run.finished)), h("small", null, `ended ${moment(run.finished)}`)] : [running(run.started), h("small", null, `since ${moment(run.started)}`)];
  return h("dl", { class: "tiles" },
    tile("Round", progress(run)), tile("Score", headline(run)),
    tile("Sites", `${connected(run).length} of ${run.sites.length}`, h("small", null, `connected, ${approvals(run).length} approved`)),
    tile("Traffic", h("span", null, "↑ ", size(sum.allUp)), h("small", null, `↓ ${size(sum.allDown)}`)), tile("Time", time));
}
