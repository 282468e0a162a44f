// One answer on the page: its tokens coloured by source, a legend, numbers, and a token's details.

import { byId, el, gauge, number, percent, plural, table } from "./dom.js";
import { look, mark, TARGET } from "./palette.js";

const KEYS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };

export class Pane {
  /** `title` names the pane; tokens tell their details in the element with the id "token". */
  constructor(title) {
    this.legend = el("ul", { class: "legend", "aria-label": "Tokens by source" });
    this.numbers = el("p", { class: "numbers" });
    this.text = el("div", {
      class: "answer", role: "group", "aria-label": `${title}: text`,
      keydown: (event) => this._move(event),
      focusin: (event) => {
        this._tell(event.target);
        event.target.scrollIntoView({ block: "nearest" }); // the details may have made room
      },
      pointerover: (event) => this._tell(event.target),
    });
    this.element = el("section", { class: "pane", "aria-label": title },
      el("h3", {}, title), this.numbers, this.text, this.legend);
    this._tokens = new Map(); // span -> tokens
  }

  show(pieces) {
    for (const piece of pieces) {
      const source = piece.tokens[0]?.source ?? TARGET;
      const span = el("span", {
        class: `token ${look(source)}`,
        tabindex: this._tokens.size ? "-1" : "0",
        "aria-describedby": "token",
      }, piece.text);
      this._tokens.set(span, piece.tokens);
      this.text.append(span);
    }
  }

  showNumbers(answer, seconds) {
    const speed = decodeSpeed(answer);
    const parts = [plural(answer.numTokens, "token")];
    if (answer.numForwards) {
      parts.push(`${number(answer.numTokens / answer.numForwards, 2)} per forward`);
    }
    parts.push(`${number(seconds, 1)} s`);
    if (speed) parts.push(`${number(speed, 0)} tokens/s`);
    this.numbers.textContent = parts.join(" · ");
    const counts = [...answer.counts].sort((one, other) => other[1] - one[1]);
    this.legend.replaceChildren(
      ...counts.map(([source, count]) => el("li", {}, mark(source), ` ${count}`)));
  }

  _move(event) {
    const spans = [...this._tokens.keys()];
    const at = spans.indexOf(event.target);
    const ends = { Home: 0, End: spans.length - 1 };
    const to = ends[event.key] ?? at + (KEYS[event.key] ?? 0);
    if (at < 0 || (!(event.key in ends) && !(event.key in KEYS))) return;
    event.preventDefault();
    const next = spans[Math.max(0, Math.min(spans.length - 1, to))];
    event.target.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }

  _tell(span) {
    const tokens = this._tokens.get(span);
    if (!tokens?.length) return;
    byId("token").replaceChildren(...tokens.map(details));
    byId("token").hidden = false;
  }
}

/** Tokens per second from the first token to the last, as the server measured; null if unknown. */
export function decodeSpeed(answer) {
  const milliseconds = answer.metrics?.generation_time_ms;
  return milliseconds ? (answer.numTokens - 1) / (milliseconds / 1000) : null;
}

function details(token) {
  const facts = [el("strong", {}, visible(token.name)), " "];
  facts.push(token.source === TARGET ? "said by the target itself" : "drafted by ");
  if (token.source !== TARGET) facts.push(mark(token.source));
  if (token.confidence !== null) facts.push(`, which was ${percent(token.confidence)} sure`);
  if (token.logprob === null) return el("p", {}, facts);
  facts.push(`; the target gives it ${percent(Math.exp(token.logprob))}`);
  const rows = token.top.map((one) => {
    const share = Math.exp(one.logprob);
    return [visible(one.token), percent(share), gauge(share)];
  });
  const others = rows.length
    ? table("What the target might have said", ["Token", "Probability", ""], rows) : null;
  return el("div", { class: "details" }, el("p", {}, facts), others);
}

/** Spaces and line ends that can be seen. */
const visible = (text) =>
  text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
