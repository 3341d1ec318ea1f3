// Table rows of sites: connection, last heartbeat, activity, free disk space, version.

import { badge, h } from "./dom.js";
import { formatBytes, formatCountOf, isNumber } from "./format.js";
import { runHash } from "./run_states.js";
import { timeAgo } from "./times.js";

export const SITE_COLUMNS = [
  { title: "Site" },
  { title: "Connection" },
  { title: "Last seen" },
  { title: "Activity" },
  { title: "Free disk", number: true },
  { title: "Version" },
];
const LOW_DISK_BYTES = 10e9; // default limit of site.toml, below which an agent starts no work

/** The site without the time of its last heartbeat while it is connected, so that heartbeats cause no redraw. */
export const withoutHeartbeat = (site) => ({ ...site, last_seen: site.connected ? "now" : site.last_seen });

/** `extraCells(site)`: cells of further columns. */
export function siteRows(sites, { showKeys = false, extraCells = () => [] } = {}) {
  const sortKey = (site) => `${site.left ? 1 : 0}${site.site}`;
  return [...sites]
    .sort((a, b) => sortKey(a).localeCompare(sortKey(b)))
    .map((site) => [
      [h("strong", null, site.site), showKeys && keyDetails(site)],
      connectionBadge(site),
      site.connected ? "now" : timeAgo(site.last_seen),
      activity(site),
      freeDisk(site.status ?? {}),
      site.version ?? "–",
      ...extraCells(site),
    ]);
}

const keyDetails = (site) =>
  h(
    "details",
    { id: `keys-${site.site}` },
    h("summary", { "aria-label": `Keys of ${site.site}` }, "keys"),
    h("small", null, `agent ${site.fingerprint ?? "?"}`),
    h("small", null, `officer ${site.officer ?? "?"}`),
  );

export function connectionBadge(site) {
  if (site.left) return badge("quiet", "has left");
  if (!site.last_seen && !site.connected) return badge("wait", "never connected");
  return site.connected ? badge("good", "connected") : badge("warn", "not connected");
}

/** From the agent's heartbeat: its run, the state of its FLARE client, the number of warnings. */
function activity(site) {
  const { run, flare, warnings, state } = site.status ?? {};
  const notes = [
    flare === "restarting" && "its FLARE client restarts",
    warnings && `${formatCountOf(warnings, "warning")}: see hemofed site status at the site`,
  ].filter(Boolean);
  const text = run
    ? ["in ", h("a", { href: runHash(run) }, run)]
    : site.connected
      ? "idle"
      : state === "stopped"
        ? "its agent was stopped"
        : "–";
  return [text, notes.length > 0 && h("small", null, notes.join("; "))];
}

function freeDisk(status) {
  const bytes = 1e9 * status.disk_free_gb;
  if (!isNumber(bytes)) return "–";
  return bytes < LOW_DISK_BYTES ? [badge("warn", formatBytes(bytes)), h("small", null, "low")] : formatBytes(bytes);
}
