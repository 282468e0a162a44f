// The live view: asks the server once a second while it can be seen, and draws what changed.

import { get } from "./api.js";
import { acceptance, choices, parts, submitted, timeline } from "./charts.js";
import { byId, el, gauge, number, percent, plural, table } from "./dom.js";
import { know, mark, marks } from "./palette.js";

const SPAN = 120; // seconds of history
const EVERY = 1000; // milliseconds
const AFTER_FAULT = 3000;
const RECENT = 10; // seconds over which rates are taken
const FEW = 30; // draft tokens that say little
const NUM_DECISIONS = 80;
const NUM_REASONS = 8;

const CAUSES = {
  kv_mismatch: "KV mismatch (must be 0)",
  target_disagrees: "the target says otherwise",
  sampled_otherwise: "another token was drawn",
  truncated_by_plan: "left out: would not pay",
  out_of_vocabulary: "not in the vocabulary",
  stop: "behind the end",
  length: "no room left",
};

let history = []; // snapshots of the last SPAN seconds
let decisions = []; // of the planner, oldest first
let timer = null;
let asking = null; // AbortController
let isPaused = false;

export function startLive() {
  byId("pause").addEventListener("click", () => {
    isPaused = !isPaused;
    byId("pause").setAttribute("aria-pressed", isPaused);
    byId("pause").textContent = isPaused ? "Go on" : "Pause";
    follow();
  });
  document.addEventListener("visibilitychange", follow);
}

/** Begin or stop to ask, as the view is seen or not. */
export function follow() {
  const seen = !document.hidden && !byId("live").hidden && !isPaused;
  if (seen && !asking) {
    asking = new AbortController();
    tick(asking.signal);
  } else if (!seen && asking) {
    asking.abort();
    asking = null;
    clearTimeout(timer);
    byId("pulse").textContent = "Paused.";
  }
}

async function tick(signal) {
  let wait = EVERY;
  try {
    take(await get(`live?since=${decisions.at(-1)?.step ?? 0}`, signal));
    byId("pulse").textContent = "Updated every second.";
  } catch (error) {
    if (signal.aborted) return;
    byId("pulse").textContent = `No news: ${error.message}.`;
    wait = AFTER_FAULT;
  }
  if (!signal.aborted) timer = setTimeout(() => tick(signal), wait);
}

function take(now) {
  if (now.started !== history.at(-1)?.started) { // another server than before
    history = [];
    decisions = [];
  }
  know(now.sources.map((source) => source.name));
  history.push(now);
  history = history.filter((one) => now.time - one.time <= SPAN);
  decisions = [...decisions, ...now.decisions].slice(-NUM_DECISIONS);
  showTiles(now);
  showThroughput(now);
  showAcceptance(now);
  showChoice();
  showCache(now.kv);
  showCauses(now.rejections);
  showHealth(now.sources);
  showPhases(now);
  showRequests(now.requests);
}

const put = (id, ...children) => byId(id).replaceChildren(...children);
const width = (id) => Math.max(240, byId(id).clientWidth); // a unit of a chart is a pixel: letters stay large
const note = (text) => el("p", { class: "note" }, text);

/** What happened between two snapshots, per second; the newest RECENT seconds by default. */
function change(now, read, before = history.find((one) => now.time - one.time <= RECENT)) {
  const seconds = now.time - before.time;
  return seconds > 0 ? (read(now) - read(before)) / seconds : 0;
}

function showTiles(now) {
  const { speculation, requests, kv } = now;
  const tokens = change(now, (one) => one.speculation.num_output_tokens);
  const forwards = change(now, (one) => one.speculation.num_target_steps);
  const drafted = change(now, (one) => one.speculation.num_draft_tokens);
  const kept = change(now, (one) => one.speculation.num_accepted_draft_tokens);
  const tiles = [
    ["Tokens/s", number(tokens, tokens < 10 ? 1 : 0)],
    ["Tokens/forward", forwards ? number(tokens / forwards, 2) : "–"],
    ["Drafts kept", drafted ? percent(kept / drafted) : "–"],
    ["Running", `${requests.num_running} of ${requests.max_running}`],
    ["Waiting", `${requests.num_waiting}`],
    ["KV in use", percent(kv.num_held / kv.num_pages)],
    ["Steps/s", number(change(now, (one) => one.steps), 0)],
    ["Tokens in all", number(speculation.num_output_tokens)],
  ];
  put("tiles", ...tiles.map(([name, value]) =>
    el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, value))));
}

function showThroughput(now) {
  const read = (one) => one.speculation.num_output_tokens;
  const points = history.slice(1).map((one, i) => [now.time - one.time, change(one, read, history[i])]);
  const newest = points.at(-1)?.[1] ?? 0;
  put("throughput", timeline(width("throughput"), points, SPAN,
    `Tokens per second, ${number(newest)} now`));
  const rows = points.slice(-20).reverse().map(([ago, value]) => [`${number(ago)} s ago`, number(value, 1)]);
  put("throughput-table", table("Throughput", ["When", "Tokens/s"], rows));
}

function showAcceptance(now) {
  const drafting = now.sources.filter((source) => source.drafted.length);
  if (!drafting.length) {
    put("acceptance", note("Nothing has been drafted yet."));
    put("acceptance-table");
    return;
  }
  put("acceptance", acceptance(drafting, FEW));
  const rows = drafting.flatMap((source) => source.drafted.map((count, i) => [
    mark(source.name), `${i + 1}`, number(count), number(source.accepted[i]),
    percent(source.accepted[i] / Math.max(1, count)),
  ]));
  put("acceptance-table",
    table("Acceptance", ["Source", "Position", "Drafted", "Kept", "Share"], rows));
}

function showChoice() {
  if (!decisions.length) {
    put("choice", note("No step with drafts yet."));
    put("choice-table");
    return;
  }
  const last = decisions.at(-1);
  put("choice", choices(width("choice"), decisions,
    `Draft tokens of the last ${plural(decisions.length, "step")}; the planner expects `
    + `${number(last.expected_speedup, 2)} times the speed of plain decoding in the newest`));
  const rows = decisions.slice(-NUM_REASONS).reverse().map((one) => [
    `${one.step}`, candidates(one), chosen(one),
    `${number(one.expected_tokens - one.plain_tokens, 1)}`, `${number(one.expected_speedup, 2)}×`,
  ]);
  put("choice-table", table("The planner’s newest decisions",
    ["Step", "Candidates: tokens, expected to be kept", "Chosen", "Expected gain", "Speed-up"], rows));
}

/** The proposals of all requests of a step, summed by source. */
function candidates(decision) {
  const sums = new Map();
  for (const one of decision.choices.flatMap((choice) => choice.considered)) {
    const [tokens, expected] = sums.get(one.source) ?? [0, 0];
    sums.set(one.source, [tokens + one.num_tokens, expected + one.expected]);
  }
  if (!sums.size) return "none";
  return el("ul", { class: "plain" }, [...sums].map(([name, [tokens, expected]]) =>
    el("li", {}, marks(name), ` ${tokens}, ${number(expected, 1)}`)));
}

function chosen(decision) {
  const counts = [...submitted(decision)];
  if (!counts.length) return "plain decoding";
  const shapes = new Set(decision.choices.map((choice) => choice.shape).filter((s) => s !== "none"));
  const how = [...shapes].filter((shape) => shape !== "one").join(", ");
  return el("ul", { class: "plain" }, counts.map(([name, count]) =>
    el("li", {}, mark(name), ` ${count}`)), how ? el("li", {}, `as a ${how}`) : null);
}

function showCache(kv) {
  const rows = [
    ["Held by requests", "held", kv.num_held],
    ["Prefixes kept for reuse", "known", kv.num_known],
    ["Empty", "free", kv.num_pages - kv.num_held - kv.num_known],
  ];
  const said = rows.map(([name, , pages]) => `${name}: ${pages}`).join(", ");
  put("kv", parts(width("kv"), rows, `KV pages. ${said}`));
  const pages = rows.map(([name, look, count]) => [
    el("span", { class: `swatch ${look}` }, name), number(count), percent(count / kv.num_pages)]);
  const zones = Object.entries(kv.zones).map(([name, tokens]) => [mark(name), number(tokens), "tokens"]);
  put("kv-table", table(`Pages of ${kv.page_size} tokens`, ["Pages", "", ""], pages),
    table("KV by who computed it", ["Text held by", "", ""], zones));
}

/** A mismatch of KV must never be: it is listed also where it never was. */
function showCauses(causes) {
  const rows = Object.entries({ kv_mismatch: 0, ...causes }).sort((one, other) => other[1] - one[1]);
  const sum = rows.reduce((all, [, count]) => all + count, 0);
  put("causes", table("Draft tokens that were not kept", ["Cause", "Tokens", ""],
    rows.map(([cause, count]) => [
      CAUSES[cause] ?? cause.replaceAll("_", " "), number(count), meter(count / Math.max(1, sum))])));
}

const meter = (share) => el("span", { class: "measure" }, gauge(share), percent(share));

function showHealth(sources) {
  if (!sources.length) return put("health", note("Nobody drafts on this server."));
  return put("health", table("Draft sources", ["Source", "Health", "Faults", "One call"],
    sources.map((one) => [
      mark(one.name), one.health === null ? "not asked yet" : percent(one.health),
      number(one.num_failures),
      one.call_seconds ? `${number(1000 * one.call_seconds, 2)} ms` : "–",
    ])));
}

function showPhases(now) {
  const names = Object.keys(now.phases);
  const rates = names.map((name) => change(now, (one) => one.phases[name]));
  const busy = rates.some((rate) => rate > 0);
  const values = busy ? rates : names.map((name) => now.phases[name]);
  const sum = values.reduce((all, value) => all + value, 0) || 1;
  put("phases", table("Time of steps by phase", ["Phase", busy ? "Lately" : "Since the start"],
    names.map((name, i) => [name, meter(values[i] / sum)])));
}

function showRequests(requests) {
  if (!requests.listed.length) return put("requests", note("Nobody is served now."));
  const rows = requests.listed.map((one) => [
    one.id, one.status, number(one.num_prompt_tokens),
    `${number(one.num_output_tokens)} of ${number(one.max_tokens)}`,
    `${one.priority}`, `${number(one.age, 1)} s`,
    one.due === null ? "–" : `${number(one.due, 1)} s`,
  ]);
  const left = requests.num_running + requests.num_waiting - rows.length;
  return put("requests", table("Requests",
    ["Request", "State", "Prompt", "Output", "Priority", "Age", "Due in"], rows),
    left > 0 ? note(`and ${number(left)} more`) : "");
}
