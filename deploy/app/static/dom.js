// Creates elements from data. Text always becomes a text node, so a name such as "<img onerror=...>" is never parsed.

const SVG = "http://www.w3.org/2000/svg";

export const h = (tag, attrs, ...children) => fill(document.createElement(tag), attrs, children);
export const svg = (tag, attrs, ...children) => fill(document.createElementNS(SVG, tag), attrs, children);
export const byId = (id) => document.getElementById(id);

function fill(node, attrs, children) {
  for (const [name, value] of Object.entries(attrs ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const formatCount = (n) => n.toLocaleString("en-GB");
export const formatPercent = (fraction, digits = 1) => (fraction === null ? "–" : `${(100 * fraction).toFixed(digits)}\u00a0%`);
export const capitalize = (text) => text.charAt(0).toUpperCase() + text.slice(1);
/** Four digits, such as 0.9714, but never 1.0000 or 0.0000 for other numbers. */
export const formatProbability = (p) => (p > 0.9999 && p < 1 ? "> 0.9999" : p < 0.0001 && p > 0 ? "< 0.0001" : p.toFixed(4));
