// From the events of a streamed chat to its tokens, each with the text that it shows.
//
// Text may lag behind tokens: inside a character that several tokens make, or where a stop string
// may begin. Joined pieces are always the streamed text, whatever tokens say of themselves.

const PART = "\ufffd"; // in the text of a token that holds a part of a character

export class Answer {
  constructor() {
    this.text = "";
    this.numTokens = 0;
    this.numForwards = 0;
    this.counts = new Map(); // source -> tokens
    this.finish = null;
    this.metrics = null;
    this._open = []; // tokens whose text has not come
    this._text = ""; // that no token has taken
  }

  /** Take in an event; returns the pieces it completes: [{text, tokens}]. */
  add(event) {
    this.metrics = event.metrics ?? this.metrics;
    const [choice] = event.choices;
    if (!choice) return [];
    const said = (choice.delta.reasoning_content ?? "") + (choice.delta.content ?? "");
    this.text += said;
    this._text += said;
    const sources = choice.token_sources ?? [];
    if (sources.length) this.numForwards += 1;
    sources.forEach((source, i) => this._token(choice, source, i));
    this.finish = choice.finish_reason ?? this.finish;
    const pieces = this._pieces();
    return this.finish ? [...pieces, ...this._last()] : pieces;
  }

  _token(choice, source, i) {
    const told = choice.logprobs?.content?.[i];
    this.numTokens += 1;
    this.counts.set(source, (this.counts.get(source) ?? 0) + 1);
    this._open.push({
      source,
      name: told?.token ?? "",
      logprob: told?.logprob ?? null,
      top: told?.top_logprobs ?? [],
      confidence: choice.token_confidences?.[i] ?? null,
    });
  }

  _pieces() {
    const pieces = [];
    while (this._open.length) {
      const size = this._open[0].name.includes(PART) ? this._joint() : this._single();
      if (size === null) break;
      const [numTokens, numCharacters] = size;
      pieces.push({
        text: this._text.slice(0, numCharacters),
        tokens: this._open.splice(0, numTokens),
      });
      this._text = this._text.slice(numCharacters);
    }
    return pieces;
  }

  /** [tokens, characters] of the next token, or null if its text may still come. */
  _single() {
    const { name } = this._open[0];
    if (this._text.startsWith(name)) return [1, name.length];
    return name.startsWith(this._text) ? null : [1, 0]; // one that is not shown, as the end is
  }

  /** The same for tokens that make characters together: what stands before the next whole one. */
  _joint() {
    const count = this._open.findIndex((token) => !token.name.includes(PART));
    if (count < 0) return null;
    const end = this._text.indexOf(this._open[count].name, 1);
    return end < 0 ? null : [count, end];
  }

  _last() {
    if (!this._open.length && !this._text) return [];
    const piece = { text: this._text, tokens: this._open };
    this._open = [];
    this._text = "";
    return [piece];
  }
}
