// The conversation: send, stop, regenerate; options of sampling; what each answer cost.

import { events } from "./api.js";
import { showBill } from "./bill.js";
import { byId, element, seconds } from "./dom.js";
import { render } from "./markdown.js";
import { hide, tokenView } from "./tokens.js";

const EXAMPLES = ["Why is the sky blue?", "Write a haiku about rivers.", "Explain what a KV cache is, as a list."];
const NUMBERS = {
  temperature: [0, 2, false], top_p: [0, 1, false], top_k: [-1, 1e6, true], min_p: [0, 1, false],
  max_tokens: [1, 1e6, true], seed: [-(2 ** 53), 2 ** 53, true],
};
const TOP_LOGPROBS = 5;

const turns = []; // {role, content, ...}; of an answer also its tokens, id and error
let running = null; // the AbortController of the answer being written

const log = byId("log"), prompt = byId("prompt"), form = byId("composer"), settings = byId("settings");

export function start() {
  for (const text of EXAMPLES) {
    const use = () => { prompt.value = text; form.requestSubmit(); };
    byId("examples").append(element("li", {}, element("button", { type: "button", class: "quiet", onclick: use }, text)));
  }
  form.addEventListener("submit", (event) => { event.preventDefault(); send(); });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
  });
  prompt.addEventListener("input", grow);
  byId("stop").addEventListener("click", stop);
  byId("clear").addEventListener("click", clear);
  byId("options").addEventListener("click", () => {
    settings.hidden = !settings.hidden;
    byId("options").setAttribute("aria-expanded", String(!settings.hidden));
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") { hide(); stop(); } });
  log.addEventListener("scroll", hide, { passive: true });
  if (!matchMedia("(pointer: coarse)").matches) prompt.focus({ preventScroll: true }); // no keyboard over a phone's screen
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function stop() {
  running?.abort();
}

function clear() {
  stop();
  turns.length = 0;
  log.querySelectorAll(".message").forEach((each) => each.remove());
  byId("welcome").hidden = false;
  prompt.focus();
}

// The options as fields of a body; an Error says what is wrong.
function options() {
  const found = {};
  for (const [name, [low, high, whole]] of Object.entries(NUMBERS)) {
    const text = form.elements[name].value.trim().replace(",", ".");
    if (!text) continue;
    const value = Number(text);
    if (!(value >= low && value <= high) || (whole && !Number.isInteger(value))) {
      throw new Error(`${name} must be ${whole ? "a whole number" : "a number"} from ${low} to ${high}`);
    }
    found[name] = value;
  }
  if (form.elements.logprobs.checked) Object.assign(found, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  return found;
}

function send() {
  const text = prompt.value.trim();
  if (!text || running) return;
  let fields;
  const wrong = byId("settings-error");
  wrong.hidden = true;
  try {
    fields = options();
  } catch (error) {
    settings.hidden = wrong.hidden = false;
    wrong.textContent = error.message;
    return;
  }
  prompt.value = "";
  grow();
  byId("welcome").hidden = true;
  turns.push({ role: "user", content: text });
  log.append(element("div", { class: "message user" }, element("div", { class: "text" }, text)));
  answer(fields);
}

function regenerate() {
  if (running || turns.at(-1)?.role !== "assistant") return;
  turns.pop();
  log.querySelector(".message:last-child").remove();
  let fields;
  try {
    fields = options();
  } catch {
    fields = {};
  }
  answer(fields);
}

function messages() {
  const system = form.elements.system.value.trim();
  const known = turns.map(({ role, content }) => ({ role, content }));
  return system ? [{ role: "system", content: system }, ...known] : known;
}

async function answer(fields) {
  const turn = { role: "assistant", content: "", thought: "", tokens: [] };
  const body = { ...fields, messages: messages(), stream: true, stream_options: { include_usage: true } };
  const view = answerView(turn);
  log.append(view.root);
  log.scrollTop = log.scrollHeight;
  running = new AbortController();
  byId("stop").hidden = false;
  byId("send").disabled = true;
  const began = performance.now();
  let first = 0, usage = null, reason = "";
  try {
    const request = {
      method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal: running.signal,
    };
    for await (const chunk of events("/v1/chat/completions", request)) {
      turn.id ??= chunk.id;
      usage = chunk.usage ?? usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      const { content, reasoning_content: thought } = choice.delta;
      if ((content || thought) && !first) first = performance.now();
      turn.content += content ?? "";
      turn.thought += thought ?? "";
      if (choice.logprobs?.content) turn.tokens.push(...choice.logprobs.content);
      reason = choice.finish_reason ?? reason;
      view.update();
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else view.fail(error.message);
  }
  const ended = performance.now();
  running = null;
  byId("stop").hidden = true;
  byId("send").disabled = false;
  turns.push(turn);
  const count = usage?.completion_tokens ?? turn.tokens.length;
  view.end({ ttft: (first - began) / 1e3, rate: (count - 1) / ((ended - first) / 1e3), count, reason, first });
  for (const button of log.querySelectorAll(".regenerate")) button.hidden = button.closest(".message") !== view.root;
}

function answerView(turn) {
  const text = element("div", { class: "text" }), thought = element("details", { class: "thought", hidden: true });
  const meta = element("div", { class: "meta" });
  const root = element("article", { class: "message busy", "aria-label": "Answer", "aria-busy": "true" }, thought, text, meta);
  let drawn = true;
  const draw = () => {
    drawn = true;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    if (turn.thought) {
      thought.hidden = false;
      thought.replaceChildren(element("summary", {}, "Thinking"), turn.thought);
    }
    text.replaceChildren(render(turn.content));
    if (atEnd) log.scrollTop = log.scrollHeight;
  };
  return {
    root,
    update() {
      if (drawn) { drawn = false; requestAnimationFrame(draw); }
    },
    fail(message) {
      text.after(element("p", { class: "error", role: "alert" }, message));
    },
    end(figures) {
      draw();
      root.classList.remove("busy");
      root.removeAttribute("aria-busy");
      meta.append(...metaParts(turn, text, root, figures, draw));
      log.scrollTop = log.scrollHeight;
    },
  };
}

function metaParts(turn, text, root, { ttft, rate, count, reason, first }, draw) {
  const parts = [];
  if (count) parts.push(`${count} tokens`);
  if (first) parts.push(`first after ${seconds(ttft)}`);
  if (count > 2 && Number.isFinite(rate)) parts.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`);
  if (reason === "length") parts.push("cut at the most tokens");
  if (reason === "stopped") parts.push("stopped");
  const made = [element("span", { class: "figures" }, parts.join(" · "))];
  const button = (label, act, properties = {}) => {
    const each = element("button", { type: "button", ...properties }, label);
    each.addEventListener("click", () => act(each));
    made.push(each);
  };
  if (turn.tokens.length) {
    button("Tokens", (own) => {
      const shown = own.getAttribute("aria-pressed") === "true";
      own.setAttribute("aria-pressed", String(!shown));
      hide();
      if (shown) draw();
      else text.replaceChildren(tokenView(turn.tokens));
    }, { "aria-pressed": "false" });
  }
  if (turn.id) {
    const into = element("div", { class: "bill-place", "aria-live": "polite" });
    root.append(into);
    button("Bill", (own) => {
      const shown = own.getAttribute("aria-pressed") === "true";
      own.setAttribute("aria-pressed", String(!shown));
      if (shown) into.replaceChildren();
      else showBill(turn.id, into);
    }, { "aria-pressed": "false" });
  }
  if (turn.content) {
    button("Copy", async (own) => {
      try {
        await navigator.clipboard.writeText(turn.content);
        own.textContent = "Copied";
      } catch {
        own.textContent = "Not allowed by the browser";
      }
    });
  }
  button("Regenerate", regenerate, { class: "regenerate" });
  return made;
}
