// Small charts drawn by hand. Each is a picture with one sentence for those who do not see it; the
// numbers stand in a table beside it.

import { el, number, percent, svg } from "./dom.js";
import { look, mark } from "./palette.js";

const LEFT = 40; // room for the numbers of the axis, in pixels as all sizes
const RIGHT = 40;

function picture(width, height, label, ...parts) {
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, parts);
}

/** The smallest of 1, 2, 5, 10 … that holds the value. */
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value);
}

function axis(width, top, height, most) {
  return [0, 0.5, 1].map((share) => {
    const y = top + height * (1 - share);
    return [
      svg("line", { class: "grid", x1: LEFT, x2: width, y1: y, y2: y }),
      svg("text", { class: "tick", x: LEFT - 6, y: y + 4, "text-anchor": "end" },
        number(most * share, most < 4 ? 1 : 0)),
    ];
  });
}

/** Values over the last seconds: [[seconds ago, value], …], newest last. */
export function timeline(width, points, span, label) {
  const [top, height] = [8, 130];
  const most = ceiling(Math.max(...points.map(([, value]) => value), 0));
  const x = (ago) => LEFT + (width - LEFT) * (1 - ago / span);
  const y = (value) => top + height * (1 - value / most);
  const line = points.map(([ago, value]) => `${x(ago).toFixed(1)},${y(value).toFixed(1)}`);
  const area = points.length
    ? `${x(points[0][0])},${y(0)} ${line.join(" ")} ${x(points.at(-1)[0])},${y(0)}` : "";
  const ticks = [0, 0.25, 0.5, 0.75].map((share) => svg("text",
    { class: "tick", x: x(span * share), y: top + height + 16, "text-anchor": share ? "middle" : "end" },
    share ? `−${number(span * share)} s` : "now"));
  return picture(width, top + height + 22, label, axis(width, top, height, most),
    svg("polygon", { class: "area", points: area }),
    svg("polyline", { class: "line", points: line.join(" ") }), ticks);
}

/** One row of bars per source: the share kept at each position of a draft. */
export function acceptance(sources, fewTokens) {
  return el("div", { class: "multiples" }, sources.map((source) => {
    const [top, height, width, left] = [8, 70, 240, 38];
    const drafted = source.drafted.slice(0, 16);
    const step = (width - left) / Math.max(8, drafted.length);
    const bars = drafted.map((count, i) => {
      const share = source.accepted[i] / Math.max(1, count);
      const at = left + i * step;
      return [
        svg("rect", {
          class: count < fewTokens ? "bar few" : "bar", x: at + 1, width: step - 2,
          y: top + height * (1 - share), height: Math.max(0.5, height * share),
        }),
        svg("text", { class: "tick", x: at + step / 2, y: top + height + 13, "text-anchor": "middle" },
          drafted.length > 10 && i % 2 ? "" : i + 1),
      ];
    });
    const lines = [0, 1].map((share) => {
      const y = top + height * (1 - share);
      return [svg("line", { class: "grid", x1: left, x2: width, y1: y, y2: y }),
        svg("text", { class: "tick", x: left - 4, y: y + 4, "text-anchor": "end" }, share ? "100%" : "0")];
    });
    const said = drafted.map((count, i) => percent(source.accepted[i] / Math.max(1, count)));
    const label = `${source.name}, kept at positions 1 to ${said.length}: ${said.join(", ")}`;
    return el("figure", { class: look(source.name) },
      el("figcaption", {}, mark(source.name)),
      svg("svg", { viewBox: `0 0 ${width} ${top + height + 18}`, role: "img", "aria-label": label },
        lines, bars));
  }));
}

/** Per step a stack of the draft tokens submitted by source, and a line of what was expected. */
export function choices(width, decisions, label) {
  const [top, height] = [8, 120];
  const stacks = decisions.map(submitted);
  const most = ceiling(Math.max(...stacks.map(total), 1));
  const fastest = ceiling(Math.max(...decisions.map((one) => one.expected_speedup), 1));
  const step = (width - LEFT - RIGHT) / Math.max(20, decisions.length);
  const first = width - RIGHT - decisions.length * step;
  const bars = stacks.map((stack, i) => {
    let base = 0;
    return [...stack].map(([name, count]) => {
      base += count;
      return svg("rect", {
        class: `bar ${look(name)}`, x: first + i * step + 0.5, width: Math.max(1, step - 1),
        y: top + height * (1 - base / most), height: (height * count) / most,
      });
    });
  });
  const line = decisions.map((one, i) =>
    `${(first + (i + 0.5) * step).toFixed(1)},${(top + height * (1 - one.expected_speedup / fastest)).toFixed(1)}`);
  const right = [0, 0.5, 1].map((share) => svg("text",
    { class: "tick", x: width - RIGHT + 6, y: top + height * (1 - share) + 4 }, `${number(fastest * share, 1)}×`));
  return picture(width, top + height + 10, label, axis(width - RIGHT, top, height, most), bars,
    svg("polyline", { class: "line", points: line.join(" ") }), right);
}

/** source -> draft tokens that a step submitted for all its requests. */
export function submitted(decision) {
  const found = new Map();
  for (const choice of decision.choices) {
    for (const [name, count] of Object.entries(choice.chosen)) {
      found.set(name, (found.get(name) ?? 0) + count);
    }
  }
  return found;
}

const total = (counts) => [...counts.values()].reduce((sum, count) => sum + count, 0);

/** One bar cut in parts: [[name, class, value], …]. */
export function parts(width, rows, label) {
  const sum = rows.reduce((all, [, , value]) => all + value, 0) || 1;
  let at = 0;
  const pieces = rows.map(([, look, value]) => {
    const piece = svg("rect",
      { class: `part ${look}`, x: (width * at) / sum, y: 0, width: (width * value) / sum, height: 28 });
    at += value;
    return piece;
  });
  return picture(width, 28, label, pieces);
}
