// The live view: step records as the server sends them, its metrics once a second, and what they say in words.

import { events, getText } from "./api.js";
import { showBill } from "./bill.js";
import { BAR, bars, lines, visible } from "./charts.js";
import { byId, element, percent, seconds } from "./dom.js";
import { parse, quantiles, single } from "./metrics.js";

const KEPT = 600; // step records
const RECENT = 12; // requests listed
const WINDOW = 60; // seconds, or readings, that percentiles and lines look back
const RETRY = 2000; // milliseconds
const BOUNDS = { bandwidth: "memory bandwidth", compute: "arithmetic", host: "the host: Python, dispatch, waiting" };
const LATENCIES = {
  "First token": "time_to_first_token", "Between tokens": "inter_token", "In the queue": "queue", "Whole request": "request",
};

const records = [];
const pages = []; // [time, metrics], one a second
const recent = []; // request ids
let selected = null; // step_id
let stopper = null; // AbortController of the streams, while the view is shown
let dirty = false;

export function start() {
  const timeline = byId("timeline");
  timeline.addEventListener("pointermove", (event) => select(at(event)));
  timeline.addEventListener("pointerdown", (event) => select(at(event)));
  timeline.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    const now = records.findIndex((record) => record.step_id === selected);
    if (step) select(Math.max(0, Math.min(records.length - 1, (now < 0 ? records.length : now) + step)));
    else if (event.key === "End") select(records.length - 1);
    else if (event.key === "Home") select(records.length - visible(timeline));
    else return;
    event.preventDefault();
  });
  byId("bill-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const id = byId("bill-id").value.trim();
    if (id) showBill(id, byId("bill"));
  });
  addEventListener("resize", () => { dirty = true; });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { dirty = true; });
  setInterval(() => { if (dirty && stopper) draw(); }, 250);
}

// Watch while the view is shown, and not otherwise: reading the ledger costs the engine a little.
export function show(wanted) {
  if (wanted && !stopper) {
    stopper = new AbortController();
    follow(stopper.signal);
    poll(stopper.signal);
    dirty = true;
  } else if (!wanted && stopper) {
    stopper.abort();
    stopper = null;
  }
}

const pause = (time) => new Promise((resolve) => { setTimeout(resolve, time); });

async function follow(signal) {
  while (!signal.aborted) {
    try {
      const headers = { accept: "text/event-stream" };
      records.length = 0; // a new engine numbers its steps anew, and an old one tells the latest again
      for await (const record of events("/ledger?last=300", { headers, signal })) take(record);
    } catch (error) {
      if (error.name === "AbortError") return;
      trouble(error.message);
    }
    await pause(RETRY);
  }
}

function trouble(message) {
  byId("live-error").textContent = message;
  byId("live-error").hidden = !message;
}

function take(record) {
  trouble("");
  records.push(record);
  if (records.length > KEPT) records.splice(0, records.length - KEPT);
  for (const use of record.prefixes) {
    const id = use.request_id.split("/")[0];
    if (recent.includes(id)) recent.splice(recent.indexOf(id), 1);
    recent.unshift(id);
    recent.length = Math.min(recent.length, RECENT);
  }
  dirty = true;
}

async function poll(signal) {
  while (!signal.aborted) {
    try {
      pages.push([Date.now() / 1e3, parse(await getText("/metrics", { signal }))]);
      if (pages.length > WINDOW + 1) pages.shift();
      dirty = true;
    } catch (error) {
      if (error.name === "AbortError") return;
      trouble(error.message);
    }
    await pause(1000);
  }
}

// -- drawing

const whole = (value) => (Number.isInteger(value) ? String(value) : ""); // labels of counts

function draw() {
  dirty = false;
  const timeline = byId("timeline");
  const shown = records.slice(-visible(timeline));
  const chosen = shown.findIndex((record) => record.step_id === selected);
  bars(timeline, shown, (record) => [[record.total, record.bound]], seconds, chosen);
  bars(byId("batch"), shown, (record) => [[record.num_decode_tokens, "decode"], [record.num_prefill_tokens, "prefill"]],
    whole, chosen);
  timeline.setAttribute("aria-label", `Timeline of the latest ${shown.length} steps. ${verdict(shown)}`);
  byId("verdict").textContent = verdict(shown);
  if (pages.length) drawPages();
  drawRecent();
}

function verdict(shown) {
  if (!shown.length) return "No step has run yet.";
  const total = shown.reduce((sum, record) => sum + record.total, 0);
  const by = {};
  for (const record of shown) by[record.bound] = (by[record.bound] ?? 0) + record.total;
  const [bound, time] = Object.entries(by).sort((a, b) => b[1] - a[1])[0];
  const tokens = shown.reduce((sum, record) => sum + record.num_output_tokens, 0);
  return `Of the latest ${shown.length} steps' time, ${percent(time / total)} was bound by ${BOUNDS[bound]}. ` +
    `They made ${tokens} tokens in ${seconds(total)}.`;
}

function drawPages() {
  const [now, page] = pages.at(-1);
  const [then, before] = pages[0];
  const span = Math.max(now - then, 1e-3);
  const rate = (name) => (pages.length > 1 ? Math.max(0, single(page, name) - single(before, name)) / span : 0);
  const total = single(page, "headrace_kv_blocks"), held = single(page, "headrace_kv_blocks_held");
  tiles([
    ["Generated", rate("headrace_generated_tokens_total").toFixed(1), "tokens/s"],
    ["Prompts", rate("headrace_prompt_tokens_total").toFixed(1), "tokens/s"],
    ["Running", single(page, "headrace_requests_running"), ""],
    ["Waiting", single(page, "headrace_requests_waiting"), ""],
    ["KV cache", total ? percent(held / total) : "–", "in use"],
    ["Prefix cache", percent(single(page, "headrace_prefix_hit_ratio")), "found"],
    ["Preemptions", single(page, "headrace_engine_preemptions_total"), ""],
  ]);
  const series = (name) => pages.map(([, each]) => single(each, name));
  const blocks = series("headrace_kv_blocks_held"), running = series("headrace_requests_running");
  const waiting = series("headrace_requests_waiting");
  lines(byId("kv"), [[blocks, "decode"]], Math.max(...blocks, 4), whole);
  lines(byId("queue"), [[running, "decode"], [waiting, "waiting"]], Math.max(...running, ...waiting, 4), whole);
  byId("kv-now").textContent = `${held} of ${total}`;
  byId("window").textContent = `over the last ${Math.max(1, Math.round(span))} s`;
  byId("latency").replaceChildren(...Object.entries(LATENCIES).map(([label, name]) => row(label,
    ...quantiles(pages.length > 1 ? before : null, page, `headrace_${name}_seconds`, [0.5, 0.9, 0.99]).map(seconds))));
  const spent = Object.fromEntries((page.headrace_step_seconds_total ?? []).map(([labels, value]) => [labels.bound, value]));
  const steps = Object.fromEntries((page.headrace_steps_total ?? []).map(([labels, value]) => [labels.bound, value]));
  const all = Object.values(spent).reduce((sum, value) => sum + value, 0) || 1;
  byId("bounds").replaceChildren(...Object.keys(BOUNDS).map((bound) =>
    row(bound, steps[bound] ?? 0, seconds(spent[bound] ?? 0), percent((spent[bound] ?? 0) / all))));
}

const row = (head, ...values) =>
  element("tr", {}, element("th", { scope: "row" }, head), ...values.map((value) => element("td", {}, String(value))));

function tiles(entries) {
  byId("tiles").replaceChildren(...entries.map(([name, value, unit]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, `${value} `, element("small", {}, unit)))));
}

let listed = "";

function drawRecent() {
  if (listed === recent.join()) return; // or the focus would be lost
  listed = recent.join();
  byId("recent").replaceChildren(...recent.map((id) => element("li", {}, element("button", {
    type: "button",
    onclick: () => { byId("bill-id").value = id; showBill(id, byId("bill")); },
  }, id))));
}

// -- one step

function at(event) {
  const box = byId("timeline").getBoundingClientRect();
  return records.length - 1 - Math.floor((box.right - event.clientX) / BAR);
}

function select(index) {
  const record = records[index];
  if (!record) return;
  selected = record.step_id;
  dirty = true;
  const { judgement } = record;
  const share = Math.max(judgement.bandwidth_seconds, judgement.compute_seconds) / (judgement.device_seconds || 1);
  const parts = [
    `Step ${record.step_id}: ${seconds(record.total)} (predicted ${seconds(record.predicted)}), bound by ${BOUNDS[record.bound]}`,
    `${record.num_decode_tokens} decode and ${record.num_prefill_tokens} prefill tokens of ${record.num_spans} request${record.num_spans === 1 ? "" : "s"}`,
    `the model ran ${seconds(judgement.device_seconds)} at ${percent(Math.min(1, share))} of the machine's limit`,
    ...record.decisions.map((decision) => `${decision.what}: ${decision.chosen} (${decision.reason})`),
    ...record.refusals,
    ...record.preempted.map((id) => `preempted ${id}`),
  ];
  byId("step").textContent = `${parts.join("; ")}.`;
}
