// Creates elements from data. Text always becomes a text node, so a name such as "<img onerror=...>" is never parsed.

const SVG = "http://www.w3.org/2000/svg";

export const h = (tag, attrs, ...children) => fill(document.createElement(tag), attrs, children);
export const svg = (tag, attrs, ...children) => fill(document.createElementNS(SVG, tag), attrs, children);

function fill(node, attrs, children) {
  for (const [name, value] of Object.entries(attrs ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...flatten(children));
  return node;
}

const flatten = (children) =>
  children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);

/** Replaces the children by `create()` if `key` has changed. Focus (by id), open details and scroll positions stay. */
export function renderIfChanged(node, key, create) {
  const contentKey = JSON.stringify(key ?? null);
  if (node.contentKey === contentKey) return false;
  node.contentKey = contentKey;
  const focusedId = node.contains(document.activeElement) ? document.activeElement.id : "";
  const openIds = [...node.querySelectorAll("details[open][id]")].map((details) => details.id);
  const scrollLefts = [...node.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
  node.replaceChildren(...flatten([create()]));
  for (const details of node.querySelectorAll("details[id]")) if (openIds.includes(details.id)) details.open = true;
  [...node.querySelectorAll(".scroll")].forEach((box, index) => (box.scrollLeft = scrollLefts[index] ?? 0));
  if (focusedId) document.getElementById(focusedId)?.focus({ preventScroll: true });
  return true;
}

/** A titled section of a page; its `body` is filled later. */
export function panel(id, title, { wide = false } = {}) {
  const body = h("div", { class: "body" });
  const section = h(
    "section",
    { id, class: wide ? "wide" : null, "aria-labelledby": `${id}-title` },
    h("h2", { id: `${id}-title` }, title),
    body,
  );
  return { section, body };
}

/**
 * columns: [{title, number?, text?}]; rows: arrays of text, nodes or {cell, ...attrs}, of which the first is the row's
 * header. `stacks`: on narrow screens every row becomes a card.
 */
export function table(caption, columns, rows, { hideCaption = false, id = null, stacks = true } = {}) {
  const columnClass = (column) => [column.number && "number", column.text && "text"].filter(Boolean).join(" ") || null;
  const tableCell = (value, index) => {
    const hasAttrs = value !== null && typeof value === "object" && !(value instanceof Node) && !Array.isArray(value);
    const { cell: content, ...attrs } = hasAttrs ? value : { cell: value };
    const isHeader = index === 0;
    // explicit roles: the narrow layout changes `display`, and browsers then no longer report a table
    return h(
      isHeader ? "th" : "td",
      {
        scope: isHeader ? "row" : null,
        role: isHeader ? "rowheader" : "cell",
        class: columnClass(columns[index]),
        "data-title": columns[index].title,
        ...attrs,
      },
      content ?? "–",
    );
  };
  const header = columns.map((column) =>
    h("th", { scope: "col", role: "columnheader", class: columnClass(column) }, column.title),
  );
  const grid = h(
    "table",
    { id, role: "table", class: stacks ? "stacks" : null },
    h("caption", { class: hideCaption ? "sr" : null }, caption),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, header)),
    h(
      "tbody",
      { role: "rowgroup" },
      rows.map((row) => h("tr", { role: "row" }, row.map(tableCell))),
    ),
  );
  return reachableWhenScrolling(h("div", { class: "scroll" }, grid));
}

/** A box that scrolls must be reachable by keyboard and have a name; one that does not scroll must not be a tab stop. */
export function reachableWhenScrolling(box) {
  scrollObserver.observe(box);
  return box;
}

const scrollObserver = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const scrolls = target.scrollWidth > target.clientWidth + 1 || target.scrollHeight > target.clientHeight + 1;
    const title = target.querySelector("caption, figcaption").textContent;
    const attrs = { tabindex: "0", "aria-label": title, role: target.matches("figure") ? "figure" : "region" };
    for (const [name, value] of Object.entries(attrs))
      scrolls ? target.setAttribute(name, value) : target.removeAttribute(name);
  }
});

export const badge = (tone, text) =>
  h("span", { class: `badge ${tone}` }, h("span", { class: "mark", "aria-hidden": "true" }, MARKS[tone] ?? "•"), text);
// a shape in addition to the colour, for readers who cannot tell the colours apart
const MARKS = { good: "✓", busy: "▶", wait: "…", warn: "!", bad: "✕", neutral: "■", quiet: "–" };

export const emptyState = (title, ...next) =>
  h("div", { class: "empty" }, h("p", null, h("strong", null, title)), next.length ? h("p", null, next) : null);
export const link = (href, ...children) => h("a", { href }, children);
export const commandBlock = (text) =>
  h("pre", { class: "command", tabindex: "0", "aria-label": "command" }, h("code", null, text));

/** Reads a text out to users of screen readers; for changes of state, not for every update. */
export function announce(text) {
  const region = document.getElementById("announce");
  if (region.textContent !== text) region.textContent = text;
}
