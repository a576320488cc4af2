// The bill of a request: where its time went, from its arrival to its end.

import { getJson } from "./api.js";
import { element, percent, seconds } from "./dom.js";

const ITEMS = {
  queued: ["in the queue", "from its arrival to the first step that held it"],
  prefill: ["own prefill", "its share of the steps that ran its prompt"],
  decode: ["own decode", "its share of the steps that ran what it generated"],
  waiting: ["others' share", "the rest of those steps: what other requests took"],
  held_back: ["held back", "steps that ran while it had a row but no part in them"],
  preempted: ["preempted", "without memory, until it came back"],
  between: ["between steps", "the caller, text and an idle engine"],
};

export async function showBill(id, into) {
  try {
    into.replaceChildren(billView(await getJson(`/requests/${encodeURIComponent(id)}/bill`)));
  } catch (error) {
    into.replaceChildren(element("p", { class: "error" }, error.message));
  }
}

function billView(bill) {
  const wall = bill.wall || 1;
  const bar = element("div", { class: "total", role: "img", "aria-label": "Shares of the request's time" });
  const list = element("ul");
  for (const [name, [label, meaning]] of Object.entries(ITEMS)) {
    if (!bill[name]) continue;
    const part = element("i", { class: `b-${name}`, title: `${label}: ${percent(bill[name] / wall)}` });
    part.style.flexGrow = String(bill[name] / wall);
    bar.append(part);
    list.append(element("li", { title: meaning }, element("i", { class: `b-${name}` }),
      `${label} ${seconds(bill[name] / 1e9)} (${percent(bill[name] / wall)})`));
  }
  const first = bill.first_token === null ? "no token came" : `first token after ${seconds(bill.first_token / 1e9)}`;
  const how = bill.finish_reason === null ? "still running" : `ended: ${bill.finish_reason}`;
  return element("div", { class: "bill" },
    element("p", {}, element("strong", {}, seconds(bill.wall / 1e9)), ` in all, ${first}, ${how}`),
    bar, list,
    element("p", {}, element("small", {},
      `${bill.prompt_tokens} prompt tokens, ${bill.cached_tokens} of them from the prefix cache; ` +
      `${bill.output_tokens} generated in ${bill.steps} steps; ` +
      `${bill.preemptions} preemptions, ${bill.recomputed_tokens} tokens run again · ${bill.request_id}`)));
}
