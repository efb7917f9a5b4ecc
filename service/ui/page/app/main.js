// Starts the page: its views in one, of which the address says which is shown. Each view is loaded when it is first shown.

import { RolloutData } from "../reader/data/client.js";
import { Reader } from "../reader/view.js";
import { VocabularyStore } from "../reader/vocabulary.js";
import { get, whenKeyChanges } from "../service/api.js";
import { bindTheme } from "./theme.js";
import * as link from "./link.js";
import { bindShortcuts, shortcut, showHelp } from "./shortcuts.js";

const sections = Object.fromEntries(link.VIEWS.map((name) => [name, document.getElementById(name)]));
const TITLES = { live: "Live", play: "Playground", reader: "Reader", rollouts: "Stories", mismatch: "Mismatch" };
const views = {};
let shown = null;

function reader() {
  views.reader ??= new Reader(sections.reader, new RolloutData(), new VocabularyStore());
  return views.reader;
}

const makers = {
  live: async () => new (await import("../live/view.js")).LiveView(sections.live),
  play: async () => new (await import("../play/view.js")).Playground(sections.play, reader()),
  reader: async () => reader(),
  rollouts: async () => new (await import("../story/rollouts_view.js")).RolloutsView(sections.rollouts, reader()),
  mismatch: async () => new (await import("../story/mismatch_view.js")).MismatchView(sections.mismatch),
};

async function show({ view, values }) {
  if (shown && shown !== view) views[shown]?.leave?.();
  shown = view;
  for (const [name, section] of Object.entries(sections)) section.hidden = name !== view;
  for (const one of document.querySelectorAll("nav a[data-view]")) {
    if (one.dataset.view === view) one.setAttribute("aria-current", "page");
    else one.removeAttribute("aria-current");
  }
  document.title = `${TITLES[view]} · Rollouts`;
  views[view] ??= await makers[view]();
  if (shown === view) views[view].enter(values);
}

const reading = () => shown === "reader";
const can = (name) => () => Boolean(views[shown]?.[name]);
shortcut(["j"], "next rollout", () => views.reader.move(1), reading);
shortcut(["k"], "previous rollout", () => views.reader.move(-1), reading);
shortcut(["]"], "next group", () => views.reader.moveGroup(1), reading);
shortcut(["["], "previous group", () => views.reader.moveGroup(-1), reading);
shortcut(["g"], "group side by side, or one rollout", () => views.reader.toolbar.toggleGroup(), reading);
shortcut(["c"], "next colours: none, log-probability, weight version", () => views[shown].nextColour(), can("nextColour"));
shortcut(["m"], "loss mask on or off", () => views.reader.toolbar.toggleMask(), reading);
shortcut(["l", "ArrowRight"], "next token", () => views[shown].cursor.move(1), can("cursor"));
shortcut(["h", "ArrowLeft"], "previous token", () => views[shown].cursor.move(-1), can("cursor"));
shortcut(["/"], "to the text filter", () => views.reader.filters.text.focus(), reading);
shortcut(["o"], "open a file", () => views.reader.openFile(), reading);
shortcut(["Escape"], "back to the list", () => views[shown].back(), can("back"));
shortcut(["r"], "ask again", () => views[shown].refresh(), can("refresh"));
shortcut(["1"], "live state", () => link.go("live"));
shortcut(["2"], "playground", () => link.go("play"));
shortcut(["3"], "reader", () => link.go("reader"));
shortcut(["4"], "stories of rollouts", () => link.go("rollouts"));
shortcut(["5"], "mismatch", () => link.go("mismatch"));
shortcut(["t"], "theme: auto, light, dark", () => document.getElementById("theme").click());
shortcut(["?"], "this list", showHelp);

// A file is read wherever on the page it is dropped.
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  const [file] = event.dataTransfer.files;
  if (!file) return;
  if (!reading()) link.go("reader");
  reader().open(file);
});

bindTheme(document.getElementById("theme"));
bindShortcuts();
document.getElementById("help").addEventListener("click", showHelp);
document.getElementById("skip").addEventListener("click", (event) => {
  // The fragment of the address is the view, so the focus is moved without it.
  event.preventDefault();
  document.getElementById("main").focus();
});
link.onChange(show);
whenKeyChanges(() => location.reload());
show(link.current()).then(showService);

/** Which model and service it is, in the bar at the top. Not worth a question for a key: a view that needs one asks. */
async function showService() {
  const line = document.getElementById("service");
  try {
    const { model, versions } = await get("info", { quiet: true });
    line.textContent = [model.name, versions.engine, `service ${versions.service}`].filter(Boolean).join(" · ");
    line.hidden = false;
  } catch {
    line.hidden = true;
  }
}
