// How a source looks: a class for colour and underline, and a letter, so that colour is never alone.

import { el } from "./dom.js";

export const TARGET = "target";
const LOOKS = 6; // classes s0 … s5 of the style sheet
const names = [];

/** Give sources their looks in the server's order; later ones get the next free look. */
export function know(sources) {
  for (const name of sources) place(name);
}

function place(name) {
  if (name === TARGET) return -1;
  if (!names.includes(name)) names.push(name);
  return names.indexOf(name);
}

export const look = (name) => (name === TARGET ? "target" : `s${place(name) % LOOKS}`);

export const letter = (name) =>
  name === TARGET ? "T" : String.fromCharCode(65 + (place(name) % 19)); // T is taken

/** The mark of a source in legends and tables: its letter, drawn as its tokens are. */
export const mark = (name) => el("span", { class: `mark ${look(name)}` },
  el("b", { "aria-hidden": "true" }, letter(name)), ` ${name}`);

/** The marks of a proposal; in "a+b" the source b went on from a's last token. */
export const marks = (names) => names.split("+").map((name, i) => [i ? " then " : null, mark(name)]);
