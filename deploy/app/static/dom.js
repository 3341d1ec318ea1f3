// Elements from data. Text always becomes a text node, so a name such as "<img onerror=...>" is only ever shown.

const SVG = "http://www.w3.org/2000/svg";

export const h = (tag, attrs, ...children) => fill(document.createElement(tag), attrs, children);
export const svg = (tag, attrs, ...children) => fill(document.createElementNS(SVG, tag), attrs, children);
export const by = (id) => document.getElementById(id);

function fill(node, attrs, children) {
  for (const [name, value] of Object.entries(attrs ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const count = (n) => n.toLocaleString("en-GB");
export const percent = (share, digits = 1) => (share === null ? "–" : `${(100 * share).toFixed(digits)}\u00a0%`);
export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
/** 0.9714; never 1.0000 for what is not 1. */
export const probability = (p) => (p > 0.9999 && p < 1 ? "> 0.9999" : p < 0.0001 && p > 0 ? "< 0.0001" : p.toFixed(4));
