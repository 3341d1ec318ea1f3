// Elements from data. Text always becomes a text node, so a name such as "<img onerror=...>" is only ever shown.

const SVG = "http://www.w3.org/2000/svg";

export const h = (tag, attrs, ...children) => fill(document.createElement(tag), attrs, children);
export const svg = (tag, attrs, ...children) => fill(document.createElementNS(SVG, tag), attrs, children);

function fill(node, attrs, children) {
  for (const [name, value] of Object.entries(attrs ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...flat(children));
  return node;
}

const flat = (children) =>
  children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);

/** New children, unless `key` says that nothing changed; whoever had the focus keeps it, by id. */
export function show(node, key, make) {
  const told = JSON.stringify(key ?? null);
  if (node.told === told) return false;
  node.told = told;
  const held = node.contains(document.activeElement) ? document.activeElement.id : "";
  const open = [...node.querySelectorAll("details[open][id]")].map((details) => details.id);
  const scrolled = [...node.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
  node.replaceChildren(...flat([make()]));
  for (const details of node.querySelectorAll("details[id]")) if (open.includes(details.id)) details.open = true;
  [...node.querySelectorAll(".scroll")].forEach((box, place) => (box.scrollLeft = scrolled[place] ?? 0));
  if (held) document.getElementById(held)?.focus({ preventScroll: true });
  return true;
}

/** A titled part of a page, whose body is filled later; hidden as long as it has nothing to say. */
export function panel(id, title, { wide = false, note = null } = {}) {
  const body = h("div", { class: "body" });
  const heading = h("h2", { id: `${id}-title` }, title);
  const section = h(
    "section",
    { id, class: wide ? "wide" : null, "aria-labelledby": `${id}-title` },
    heading,
    note && h("p", { class: "quiet" }, note),
    body,
  );
  return { section, body };
}

/** columns: [{title, number?, words?}]; rows: arrays of text, nodes or {cell, ...attrs}; the first names its row. */
export function table(caption, columns, rows, { hideCaption = false, id = null, stacks = true } = {}) {
  const kind = (column) => [column.number && "number", column.words && "words"].filter(Boolean).join(" ") || null;
  const cell = (value, place) => {
    const given = value !== null && typeof value === "object" && !(value instanceof Node) && !Array.isArray(value);
    const { cell: inner, ...attrs } = given ? value : { cell: value };
    const first = place === 0;
    // roles by name: a narrow page lays rows out as cards, and browsers then forget that it is a table
    return h(
      first ? "th" : "td",
      {
        scope: first ? "row" : null,
        role: first ? "rowheader" : "cell",
        class: kind(columns[place]),
        "data-title": columns[place].title,
        ...attrs,
      },
      inner ?? "–",
    );
  };
  const grid = h(
    "table",
    { id, role: "table", class: stacks ? "stacks" : null },
    h("caption", { class: hideCaption ? "sr" : null }, caption),
    h(
      "thead",
      { role: "rowgroup" },
      h(
        "tr",
        { role: "row" },
        columns.map((column) => h("th", { scope: "col", role: "columnheader", class: kind(column) }, column.title)),
      ),
    ),
    h(
      "tbody",
      { role: "rowgroup" },
      rows.map((row) => h("tr", { role: "row" }, row.map(cell))),
    ),
  );
  const box = h("div", { class: "scroll" }, grid);
  widths.observe(box);
  return box;
}

// a box that scrolls must be reachable by keyboard, and then has to have a name; one that does not is no stop
const widths = new ResizeObserver((changes) => {
  for (const { target } of changes) {
    const scrolls = target.scrollWidth > target.clientWidth + 1;
    const named = { tabindex: "0", role: "region", "aria-label": target.querySelector("caption").textContent };
    for (const [name, value] of Object.entries(named))
      scrolls ? target.setAttribute(name, value) : target.removeAttribute(name);
  }
});

export const badge = (tone, text) =>
  h("span", { class: `badge ${tone}` }, h("span", { class: "mark", "aria-hidden": "true" }, MARKS[tone] ?? "•"), text);
// shapes beside colours: nothing is said by colour alone
const MARKS = { good: "✓", busy: "▶", wait: "…", warn: "!", bad: "✕", still: "■", quiet: "–" };

export const empty = (title, ...next) =>
  h("div", { class: "empty" }, h("p", null, h("strong", null, title)), next.length ? h("p", null, next) : null);
export const link = (to, ...children) => h("a", { href: to }, children);
export const command = (text) =>
  h("pre", { class: "command", tabindex: "0", "aria-label": "command" }, h("code", null, text));

/** Says it to screen readers once; for changes of state, not for ticks. */
export function announce(text) {
  const region = document.getElementById("announce");
  if (region.textContent !== text) region.textContent = text;
}
