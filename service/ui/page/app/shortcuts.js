// Keys of one letter. They do nothing while something is typed, and can be turned off.

import { h } from "./dom.js";

const NAME = "rollout-shortcuts";
const known = [];
const TYPED = "input, select, textarea, [contenteditable]";

export function shortcutsAreOn() {
  try {
    return localStorage.getItem(NAME) !== "off";
  } catch {
    return true;
  }
}

/** Args: `when` says whether the shortcut applies now; by default always. */
export function shortcut(keys, what, act, when = () => true) {
  known.push({ keys, what, act, when });
}

export function bindShortcuts() {
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.defaultPrevented) return;
    if (document.querySelector("dialog[open]")) return;
    const typing = event.target.closest?.(TYPED) && event.target.type !== "checkbox";
    if (event.key !== "Escape" && (typing || !shortcutsAreOn())) return;
    const found = known.find(({ keys, when }) => keys.includes(event.key) && when());
    if (!found) return;
    event.preventDefault();
    found.act(event);
  });
}

const SHOWN = { ArrowLeft: "←", ArrowRight: "→", Escape: "Esc" };

export function showHelp() {
  const on = h("input", { type: "checkbox", id: "shortcuts-on", checked: shortcutsAreOn() });
  on.addEventListener("change", () => {
    try {
      localStorage.setItem(NAME, on.checked ? "on" : "off");
    } catch {
      // They stay on.
    }
  });
  const list = known.map(({ keys, what }) => [
    h("dt", {}, ...keys.flatMap((one, at) => [at ? " " : "", h("kbd", {}, SHOWN[one] ?? one)])),
    h("dd", {}, what),
  ]);
  const dialog = h(
    "dialog",
    { "aria-labelledby": "help-title" },
    h("form", { method: "dialog" }, h("h2", { id: "help-title" }, "Keyboard shortcuts"), h("dl", { class: "shortcuts" }, ...list.flat()), h("div", { class: "row" }, on, h("label", { for: "shortcuts-on" }, "Shortcuts of one letter are on")), h("div", { class: "row" }, h("button", { class: "main" }, "Close"))),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
