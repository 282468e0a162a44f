// The playground: one prompt answered as asked, or raced against plain decoding.

import { Answer } from "./answer.js";
import { stream } from "./api.js";
import { byId, el, gauge, number, plural } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { decodeSpeed, Pane } from "./pane.js";
import { mark } from "./palette.js";

const NUM_ALTERNATIVES = 5;
let running = null; // AbortController of what is under way

export function startPlayground() {
  const choose = byId("example");
  choose.append(...EXAMPLES.map((one, i) => el("option", { value: i }, one.title)));
  choose.addEventListener("change", () => useExample(EXAMPLES[choose.value]));
  useExample(EXAMPLES[0]);
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    during(answer);
  });
  byId("race").addEventListener("click", () => byId("ask").reportValidity() && during(race));
  byId("stop").addEventListener("click", () => running?.abort());
}

/** Offer what the server has. */
export function offer(models, sources) {
  byId("model").replaceChildren(...models.map((name) => el("option", {}, name)));
  const boxes = sources.map((source) => el("label", { class: "check" },
    el("input", { type: "checkbox", name: "source", value: source.name, checked: "" }),
    mark(source.name), source.needs_prediction ? " (needs a prediction)" : null));
  const legend = byId("sources").querySelector("legend");
  byId("sources").replaceChildren(legend,
    ...(boxes.length ? boxes : [el("p", { class: "note" }, "Nobody drafts on this server.")]));
  byId("race").disabled = !boxes.length;
}

function useExample(example) {
  for (const name of ["prompt", "system", "prediction"]) byId(name).value = example[name] ?? "";
}

async function during(work) {
  running?.abort();
  const mine = (running = new AbortController());
  setBusy(true);
  byId("fault").hidden = byId("outcome").hidden = byId("empty").hidden = true;
  byId("token").hidden = true;
  byId("panes").replaceChildren();
  try {
    await work(mine.signal);
  } catch (error) {
    if (mine !== running) return;
    if (error.name === "AbortError") say("Stopped.");
    else complain(error.message);
  } finally {
    if (mine === running) setBusy(false);
  }
}

async function answer(signal) {
  const pane = new Pane("Answer");
  byId("panes").replaceChildren(pane.element);
  say("Answering …");
  const found = await follow(pane, { ...request(), top_logprobs: NUM_ALTERNATIVES }, signal);
  say(`Answered with ${plural(found.numTokens, "token")}.`);
}

/** With drafts first: what plain decoding says before cannot help them then. */
async function race(signal) {
  const drafted = new Pane("With drafts");
  const plain = new Pane("Plain");
  byId("panes").replaceChildren(drafted.element, plain.element);
  const body = request();
  body.seed ??= Math.floor(Math.random() * 2 ** 31); // the same for both
  say("Decoding with drafts …");
  const one = await follow(drafted, body, signal);
  say("Decoding plainly …");
  const other = await follow(plain, { ...body, speculative: false }, signal);
  const [fast, slow] = [one, other].map(decodeSpeed);
  const same = one.text === other.text;
  const words = same ? "The texts are the same, character by character"
    : "The texts differ: please report this";
  const work = `${one.numForwards} forwards instead of ${other.numForwards}`;
  const speed = fast && slow ? `, ${number(fast / slow, 1)} times as fast` : "";
  const result = `${words}: ${work}${speed}.`;
  byId("outcome").replaceChildren(el("p", { class: same ? "good" : "fault" }, result),
    bars([["With drafts", fast ?? 0], ["Plain", slow ?? 0]]),
    el("p", { class: "note" }, "Speed is measured here and now, one after the other: whatever else "
      + "runs on this machine counts too."));
  byId("outcome").hidden = false;
  say("Both have answered; the outcome is below.");
}

function bars(rows) {
  const most = Math.max(...rows.map(([, speed]) => speed), 1e-9);
  return el("dl", { class: "bars" }, rows.map(([name, speed]) => [
    el("dt", {}, name),
    el("dd", {}, gauge(speed / most), ` ${number(speed)} tokens/s`),
  ]));
}

async function follow(pane, body, signal) {
  const found = new Answer();
  const start = performance.now();
  const seconds = () => (performance.now() - start) / 1000;
  for await (const event of stream("v1/chat/completions", body, signal)) {
    pane.show(found.add(event));
    pane.showNumbers(found, seconds());
  }
  return found;
}

/** The body of the call that the form describes. */
function request() {
  const messages = [{ role: "user", content: byId("prompt").value }];
  const system = byId("system").value.trim();
  if (system) messages.unshift({ role: "system", content: system });
  const body = {
    model: byId("model").value || null,
    messages,
    temperature: numberOf("temperature"),
    seed: numberOf("seed"),
    max_tokens: numberOf("max-tokens"),
    logprobs: true,
    return_token_sources: true,
    include_metrics: true,
    stream_options: { include_usage: true },
  };
  const prediction = byId("prediction").value;
  if (prediction) body.prediction = { type: "content", content: prediction };
  const boxes = [...document.querySelectorAll("input[name=source]")];
  const chosen = boxes.filter((box) => box.checked).map((box) => box.value);
  if (chosen.length < boxes.length) body.speculative = chosen.length ? chosen : false;
  return body;
}

/** What stands in a field, null if nothing does. */
function numberOf(id) {
  const value = byId(id).valueAsNumber;
  return Number.isNaN(value) ? null : value;
}

function setBusy(busy) {
  byId("run").disabled = busy;
  byId("race").disabled = busy || !document.querySelector("input[name=source]");
  byId("stop").disabled = !busy;
  byId("panes").setAttribute("aria-busy", busy);
}

function say(text) {
  byId("said").textContent = text;
}

function complain(text) {
  say("");
  byId("fault").textContent = text;
  byId("fault").hidden = false;
}
