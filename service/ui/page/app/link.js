// What the page shows, as the fragment of its address: `#reader?rollout=17&status=error`. A link to it shows the same.

export const VIEWS = ["live", "play", "reader", "rollouts", "mismatch"];
const DEFAULT_VIEW = "live";
const listeners = new Set();

export function parse(fragment) {
  const [view, query = ""] = fragment.replace(/^#/, "").split(/\?(.*)/s);
  return { view: VIEWS.includes(view) ? view : DEFAULT_VIEW, values: Object.fromEntries(new URLSearchParams(query)) };
}

/** Values that are empty are left out, so that equal views have equal links. */
export function format(view, values) {
  const given = Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return query ? `#${view}?${query}` : `#${view}`;
}

export function current() {
  return parse(location.hash);
}

/** Changes what the address says without a step in the browser's history, and tells nobody. */
export function replace(view, values) {
  const fragment = format(view, values);
  if (fragment !== location.hash) history.replaceState(null, "", fragment);
}

/** Goes to another view, as a link does. */
export function go(view, values = {}) {
  location.hash = format(view, values);
}

export function onChange(listener) {
  listeners.add(listener);
}

globalThis.addEventListener?.("hashchange", () => {
  for (const listener of listeners) listener(current());
});
