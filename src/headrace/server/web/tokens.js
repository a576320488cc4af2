// The tokens of an answer, coloured by how likely each was; hover or focus tells the alternatives.

import { byId, element } from "./dom.js";

const STEPS = [[0.9, "p5"], [0.6, "p4"], [0.3, "p3"], [0.1, "p2"], [0, "p1"]];

export const probability = (logprob) => Math.exp(logprob);
const rank = (logprob) => STEPS.find(([least]) => probability(logprob) >= least)[1];

function share(logprob) {
  const part = probability(logprob) * 100;
  return part >= 0.1 ? `${part.toFixed(1)} %` : "< 0.1 %";
}

// Parts of a character come as bytes: those of consecutive tokens are read together by the text view, here each alone.
const written = (token) => token.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥");

export function tokenView(tokens) {
  const view = element("div", { class: "tokens", role: "list", "aria-label": "Tokens; arrow keys move between them" });
  for (const token of tokens) view.append(tokenSpan(token));
  if (view.firstChild) view.firstChild.tabIndex = 0;
  view.addEventListener("keydown", (event) => move(view, event));
  view.addEventListener("pointerover", (event) => show(event.target));
  view.addEventListener("pointerleave", hide);
  view.addEventListener("focusin", (event) => show(event.target));
  view.addEventListener("focusout", hide);
  return view;
}

function tokenSpan(token) {
  const made = element("span", { class: rank(token.logprob), role: "listitem", tabIndex: -1 }, written(token.token));
  made.setAttribute("aria-label", `${JSON.stringify(token.token)}, ${share(token.logprob)}`);
  made.token = token;
  return made;
}

function move(view, event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const all = [...view.children];
  const at = all.indexOf(document.activeElement);
  let to = null;
  if (step) to = all[at + step];
  else if (event.key === "Home") to = all[0];
  else if (event.key === "End") to = all.at(-1);
  else if (event.key === "Escape") hide();
  if (!to) return;
  event.preventDefault();
  document.activeElement.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
}

function show(target) {
  const token = target.token;
  if (!token) return;
  const popover = byId("popover");
  const rows = element("tbody");
  const others = token.top_logprobs ?? [];
  const own = others.some((other) => other.token === token.token) ? [] : [token];
  for (const other of [...others, ...own]) {
    rows.append(
      element("tr", { class: other.token === token.token ? "own" : "" },
        element("td", {}, written(other.token)), element("td", {}, share(other.logprob))),
    );
  }
  popover.replaceChildren(element("table", {}, rows));
  popover.hidden = false;
  const box = target.getClientRects()[0];
  const own_box = popover.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, innerWidth - own_box.width - 8));
  const below = box.bottom + 6 + own_box.height < innerHeight;
  popover.style.left = `${left}px`;
  popover.style.top = `${below ? box.bottom + 6 : Math.max(8, box.top - own_box.height - 6)}px`;
}

export function hide() {
  byId("popover").hidden = true;
}
