// Starts the page: which view is shown, and whether the server is well.

import { getJson } from "./api.js";
import * as chat from "./chat.js";
import { byId } from "./dom.js";
import * as live from "./live.js";

const VIEWS = ["chat", "live", "both"];
const EVERY = 3000; // milliseconds between looks at the server
const wide = matchMedia("(min-width: 72.01rem)");

function choose(view) {
  const shown = view === "both" && !wide.matches ? "chat" : view;
  document.body.dataset.view = shown;
  for (const each of VIEWS) {
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === shown));
    tab.tabIndex = each === shown ? 0 : -1;
  }
  live.show(shown !== "chat" && !document.hidden);
}

const wanted = () => {
  const named = location.hash.slice(2); // #/live: no element has such an id, so nothing scrolls or loses focus
  return VIEWS.includes(named) ? named : "chat";
};

function startViews() {
  const tabs = document.querySelector("nav");
  tabs.addEventListener("click", (event) => {
    const tab = event.target.closest("[role=tab]");
    if (tab) location.hash = `/${tab.id.slice(4)}`;
  });
  tabs.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const all = [...tabs.children].filter((tab) => tab.offsetParent !== null);
    const to = all[(all.indexOf(document.activeElement) + step + all.length) % all.length];
    to.focus();
    location.hash = `/${to.id.slice(4)}`;
  });
  for (const [target, name] of [[window, "hashchange"], [document, "visibilitychange"], [wide, "change"]]) {
    target.addEventListener(name, () => choose(wanted()));
  }
  choose(wanted());
}

function tell(state, text, notice = "") {
  byId("status").dataset.state = state;
  if (byId("status").textContent !== text) byId("status").textContent = text;
  byId("notice").textContent = notice;
  byId("notice").hidden = !notice;
}

async function watch() {
  for (;;) {
    try {
      const response = await fetch("/ready", { cache: "no-store" });
      const body = await response.json();
      if (response.ok) tell("ready", "ready");
      else if (body.error.message.includes("queue is full")) tell("ready", "queue full");
      else tell("loading", "not ready", body.error.message);
    } catch {
      tell("gone", "gone", "The server cannot be reached. Is it still running?");
    }
    await new Promise((resolve) => { setTimeout(resolve, EVERY); });
  }
}

async function nameModel() {
  try {
    const { data } = await getJson("/v1/models");
    const short = data[0].id.split("/").pop(); // a file's path is its name where no other was given
    byId("model").textContent = short;
    byId("model").title = data.map((each) => each.id).join(", ");
    document.title = `${short} · Headrace`;
  } catch (error) {
    byId("model").textContent = error.message;
  }
}

chat.start();
live.start();
startViews();
nameModel();
watch();
