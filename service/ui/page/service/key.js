// The caller's key: kept in sessionStorage, which ends with the tab, and nowhere else. Asked for when the service does.

import { h } from "../app/dom.js";

const NAME = "rollout-key";
let held = null;
let asking = null;

export function key() {
  try {
    return sessionStorage.getItem(NAME);
  } catch {
    return held;
  }
}

function keep(value) {
  held = value;
  try {
    if (value) sessionStorage.setItem(NAME, value);
    else sessionStorage.removeItem(NAME);
  } catch {
    // A browser that stores nothing keeps it until the page is left.
  }
}

/** Asks once, however many calls were refused. Resolves with whether a key was given. */
export function askForKey(reason) {
  asking ??= dialog(reason).finally(() => (asking = null));
  return asking;
}

function dialog(reason) {
  const input = h("input", { type: "password", id: "key-input", autocomplete: "off", spellcheck: "false", required: true });
  const forget = h("button", { type: "button" }, "Forget it");
  const form = h(
    "form",
    { method: "dialog" },
    h("h2", { id: "key-title" }, "Key of the service"),
    h("p", { id: "key-reason", class: "quiet" }, reason),
    h("div", { class: "field" }, h("label", { for: "key-input" }, "Key"), input),
    h("p", { class: "small quiet" }, "It is kept for this tab alone, until the tab is closed."),
    h("div", { class: "row" }, h("button", { class: "main", value: "use" }, "Use the key"), h("button", { value: "cancel", formnovalidate: true }, "Cancel"), key() ? forget : null),
  );
  const element = h("dialog", { "aria-labelledby": "key-title", "aria-describedby": "key-reason" }, form);
  forget.addEventListener("click", () => {
    keep(null);
    element.close("cancel");
  });
  document.body.append(element);
  element.showModal();
  return new Promise((resolve) => {
    element.addEventListener("close", () => {
      const given = element.returnValue === "use" && input.value.trim();
      if (given) keep(input.value.trim());
      element.remove();
      resolve(Boolean(given));
    });
  });
}

/** Shows the button that changes the key, once the service has asked for one. */
export function showKeyButton(onChanged) {
  const button = document.getElementById("key");
  button.hidden = false;
  button.onclick = async () => {
    if (await askForKey("Give another key.")) onChanged();
  };
}
