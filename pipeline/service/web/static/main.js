// The frame of the dashboard: the signed-in user, the page that the address names, and the bar at the top.

import { get, onSignedOut, post } from "./api.js";
import { announce, h } from "./dom.js";
import { logPage } from "./log.js";
import { loginPage } from "./login.js";
import { offerPage } from "./offer.js";
import { overviewPage } from "./overview.js";
import { runPage } from "./run.js";
import { sitesPage } from "./sites.js";
import { startClock } from "./times.js";
import { usersPage } from "./users.js";

const main = document.getElementById("main");
const bar = document.getElementById("bar");
const ALL_ROLES = ["viewer", "officer", "lead"];
// `create(user, ...path groups)` returns {title, nodes, leave?}; pages with a name are in the bar
const PAGES = [
  { path: /^\/?$/, create: overviewPage, href: "#/", name: "Overview", roles: ALL_ROLES },
  { path: /^\/sites$/, create: sitesPage, href: "#/sites", name: "Sites", roles: ALL_ROLES },
  { path: /^\/runs\/([^/]+)$/, create: runPage, roles: ALL_ROLES },
  { path: /^\/offer$/, create: offerPage, roles: ["lead"] },
  { path: /^\/users$/, create: usersPage, href: "#/users", name: "Users", roles: ["lead"] },
  { path: /^\/log$/, create: logPage, href: "#/log", name: "Log", roles: ["officer", "lead"] },
];

let user = null;
let leavePage = () => {}; // closes the event stream of the current page
let navigation = 0; // number of the latest navigation: pages that load too late are dropped

async function route() {
  const thisNavigation = (navigation += 1);
  leaveCurrentPage();
  if (!user) return showLogin();
  const path = location.hash.replace(/^#/, "");
  const page = PAGES.find((candidate) => candidate.path.test(path));
  drawBar(page);
  if (!page) return showProblem("This page does not exist", "The address may be out of date. Go to the overview.");
  if (!page.roles.includes(user.role))
    return showProblem(
      "You cannot see this page",
      `You are signed in as ${user.role}; it needs the role ${page.roles.join(" or ")}.`,
    );
  try {
    const created = await page.create(user, ...path.match(page.path).slice(1).map(decodeURIComponent));
    if (thisNavigation !== navigation) return created.leave?.();
    leavePage = created.leave ?? leavePage;
    showPage(created.title, created.nodes);
  } catch (error) {
    if (thisNavigation === navigation && user) showProblem("This page could not be loaded", error.message);
  }
}

function leaveCurrentPage() {
  leavePage();
  leavePage = () => {};
}

/** Moves the focus to the heading, so that screen readers begin there. */
function showPage(title, nodes) {
  document.title = title === "hemofed" ? title : `${title} · hemofed`;
  main.replaceChildren(...nodes);
  const heading = main.querySelector("h1");
  heading?.setAttribute("tabindex", "-1");
  if (navigation > 1) heading?.focus({ preventScroll: true });
  scrollTo(0, 0);
}

function showProblem(title, text) {
  showPage(title, [
    h("h1", null, title),
    h("p", { class: "notice bad", role: "alert" }, text),
    h("p", null, h("a", { href: "#/" }, "Overview")),
  ]);
}

function showLogin(notice = "") {
  bar.hidden = true;
  const page = loginPage(notice, async () => {
    user = await get("/api/me");
    announce(`Signed in as ${user.name}, ${user.role}.`);
    await route();
  });
  showPage(page.title, page.nodes);
  main.querySelector("input")?.focus();
}

function endSession(notice) {
  leaveCurrentPage();
  user = null;
  showLogin(notice);
}

async function signOut() {
  try {
    await post("/api/logout");
  } finally {
    endSession("You are signed out.");
  }
}

function drawBar(page) {
  const links = PAGES.filter(({ name, roles }) => name && roles.includes(user.role)).map((linked) =>
    h("li", null, h("a", { href: linked.href, "aria-current": linked === page ? "page" : null }, linked.name)),
  );
  const logo = h("img", { src: "/static/icon.svg", alt: "", width: "22", height: "22" });
  const fingerprint = user.coordinator?.fingerprint;
  bar.hidden = false;
  bar.replaceChildren(
    h("a", { class: "brand", href: "#/" }, logo, "hemofed"),
    h("nav", { "aria-label": "Pages" }, h("ul", null, links)),
    h(
      "p",
      { class: "account" },
      h("span", { title: fingerprint ? `key ${fingerprint}` : null }, user.coordinator?.name ?? ""),
      h("span", null, h("strong", null, user.name), `, ${user.role}`),
      h("button", { type: "button", id: "sign-out", onclick: signOut }, "Sign out"),
    ),
  );
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment of the address names the page
  main.focus();
});
onSignedOut(() => {
  if (user) endSession("Your session has ended. Sign in again.");
});
addEventListener("hashchange", route);
startClock();
try {
  user = await get("/api/me");
  await route();
} catch (error) {
  showLogin(error.status === 401 ? "" : error.message);
}
