// The frame: who is signed in, which page the address names, and the bar at the top.

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
const ALL = ["viewer", "officer", "lead"];
const PAGES = [
  { path: /^\/?$/, make: overviewPage, to: "#/", name: "Overview", roles: ALL },
  { path: /^\/sites$/, make: sitesPage, to: "#/sites", name: "Sites", roles: ALL },
  { path: /^\/runs\/([^/]+)$/, make: runPage, roles: ALL },
  { path: /^\/offer$/, make: offerPage, roles: ["lead"] },
  { path: /^\/users$/, make: usersPage, to: "#/users", name: "Users", roles: ["lead"] },
  { path: /^\/log$/, make: logPage, to: "#/log", name: "Log", roles: ["officer", "lead"] },
];

let me = null;
let leave = () => {};
let shown = 0;

async function route() {
  const turn = (shown += 1);
  leave();
  leave = () => {};
  if (!me) return signIn();
  const path = location.hash.replace(/^#/, "");
  const page = PAGES.find((one) => one.path.test(path));
  drawBar(page);
  if (!page) return refuse("There is no such page", "The address may be old. Go to the overview.");
  if (!page.roles.includes(me.role))
    return refuse("This page is not for you", `You are signed in as ${me.role}; it needs ${page.roles.join(" or ")}.`);
  try {
    const found = await page.make(me, ...path.match(page.path).slice(1).map(decodeURIComponent));
    if (turn !== shown) return found.leave?.();
    leave = found.leave ?? leave;
    put(found.title, found.nodes);
  } catch (error) {
    if (turn === shown && me) refuse("This page could not be shown", error.message);
  }
}

/** The new page, read from its heading on. */
function put(title, nodes) {
  document.title = title === "hemofed" ? title : `${title} · hemofed`;
  main.replaceChildren(...nodes);
  const heading = main.querySelector("h1");
  heading?.setAttribute("tabindex", "-1");
  if (shown > 1) heading?.focus({ preventScroll: true });
  scrollTo(0, 0);
}

function refuse(title, text) {
  put(title, [
    h("h1", null, title),
    h("p", { class: "notice bad", role: "alert" }, text),
    h("p", null, h("a", { href: "#/" }, "Overview")),
  ]);
}

function signIn(text = "") {
  bar.hidden = true;
  const found = loginPage(text, async () => {
    me = await get("/api/me");
    announce(`Signed in as ${me.name}, ${me.role}.`);
    await route();
  });
  put(found.title, found.nodes);
  main.querySelector("input")?.focus();
}

async function signOut() {
  try {
    await post("/api/logout");
  } finally {
    leave();
    leave = () => {};
    me = null;
    signIn("You are signed out.");
  }
}

function drawBar(page) {
  const links = PAGES.filter((one) => one.to && one.roles.includes(me.role));
  bar.hidden = false;
  bar.replaceChildren(
    h(
      "a",
      { class: "brand", href: "#/" },
      h("img", { src: "/static/icon.svg", alt: "", width: "22", height: "22" }),
      "hemofed",
    ),
    h(
      "nav",
      { "aria-label": "Pages" },
      h(
        "ul",
        null,
        links.map((one) =>
          h("li", null, h("a", { href: one.to, "aria-current": one === page ? "page" : null }, one.name)),
        ),
      ),
    ),
    h(
      "p",
      { class: "who" },
      h(
        "span",
        { title: me.coordinator?.fingerprint ? `key ${me.coordinator.fingerprint}` : null },
        me.coordinator?.name ?? "",
      ),
      h("span", null, h("strong", null, me.name), `, ${me.role}`),
      h("button", { type: "button", class: "plain", id: "sign-out", onclick: signOut }, "Log out"),
    ),
  );
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address belongs to the pages
  main.focus();
});
onSignedOut(() => {
  if (!me) return;
  leave();
  leave = () => {};
  me = null;
  signIn("Your session has ended. Sign in again.");
});
addEventListener("hashchange", route);
startClock();
try {
  me = await get("/api/me");
  await route();
} catch (error) {
  signIn(error.status === 401 ? "" : error.message);
}
