// A site's health in one row: connected, last seen, version, room on its disk, what it does.

import { badge, h } from "./dom.js";
import { since } from "./times.js";
import { countOf, isNumber, size } from "./words.js";

export const SITE_COLUMNS = [
  { title: "Site" },
  { title: "Connection" },
  { title: "Last seen" },
  { title: "Doing" },
  { title: "Free disk", number: true },
  { title: "Version" },
];
const LOW_DISK = 10e9; // bytes; an agent begins no work below its limit, which is this unless site.toml says

/** The same as long as it is connected, however often it is seen. */
export const steady = (site) => ({ ...site, last_seen: site.connected ? "now" : site.last_seen });

export function siteRows(sites, keys = false, extra = () => []) {
  const order = (site) => `${site.left ? 1 : 0}${site.site}`;
  return [...sites]
    .sort((a, b) => order(a).localeCompare(order(b)))
    .map((site) => [
      [
        h("strong", null, site.site),
        keys &&
          h(
            "details",
            { id: `keys-${site.site}` },
            h("summary", { "aria-label": `Keys of ${site.site}` }, "keys"),
            h("small", null, `agent ${site.fingerprint ?? "?"}`),
            h("small", null, `officer ${site.officer ?? "?"}`),
          ),
      ],
      connection(site),
      site.connected ? "now" : since(site.last_seen),
      doing(site),
      disk(site.status ?? {}),
      site.version ?? "–",
      ...extra(site),
    ]);
}

export function connection(site) {
  if (site.left) return badge("quiet", "has left");
  if (!site.last_seen && !site.connected) return badge("wait", "never seen");
  return site.connected ? badge("good", "connected") : badge("warn", "not connected");
}

/** As the agent's beats tell: the run it takes part in, the engine's state, how many warnings it has. */
function doing(site) {
  const { run, flare, warnings, state } = site.status ?? {};
  const notes = [
    flare === "restarting" && "its engine restarts",
    warnings && `${countOf(warnings, "warning")}: see hemofed site status there`,
  ].filter(Boolean);
  const words = run
    ? ["in ", h("a", { href: `#/runs/${encodeURIComponent(run)}` }, run)]
    : site.connected
      ? "waits for work"
      : state === "stopped"
        ? "its agent was stopped"
        : "–";
  return [words, notes.length > 0 && h("small", null, notes.join("; "))];
}

function disk(status) {
  const free = 1e9 * status.disk_free_gb;
  if (!isNumber(free)) return "–";
  return free < LOW_DISK ? [badge("warn", size(free)), h("small", null, "little left")] : size(free);
}
