// Elements without a framework. Text goes in as text nodes only: nothing is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An HTML element; attributes that are null are left out, functions listen to events. */
export const el = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);

/** The same in SVG. */
export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null));
  return element;
}

/** A table; the first cell of a row is its heading. Cells are texts or elements. */
export function table(caption, headings, rows) {
  const line = ([first, ...rest]) =>
    el("tr", {}, el("th", { scope: "row" }, first), rest.map((cell) => el("td", {}, cell)));
  return el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": caption },
    el("table", {},
      el("caption", { class: "only-heard" }, caption),
      el("thead", {}, el("tr", {}, headings.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, rows.map(line))));
}

/** A bar that is filled to a share; who does not see it reads the number beside it. */
export const gauge = (share) => svg("svg",
  { class: "gauge", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
  svg("rect", { class: "track", width: 100, height: 10, rx: 4 }),
  svg("rect", { class: "level", width: 100 * Math.min(1, share), height: 10, rx: 4 }));

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

export const number = (value, digits = 0) =>
  value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });

export const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
