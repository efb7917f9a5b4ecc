// Calls of the service that the page came from. An error is a `Problem`, with the sentence that the service says.

import { askForKey, key, showKeyButton } from "./key.js";

/** The page is at `/ui/` below the service, wherever a gateway has that. */
export const BASE = new URL("../../../", import.meta.url);
let onNewKey = () => location.reload();

export class Problem extends Error {
  constructor(message, status = 0, errors = []) {
    super(message);
    this.status = status;
    this.errors = errors;
  }
}

/** Called when the user has given another key. */
export function whenKeyChanges(listener) {
  onNewKey = listener;
}

/**
 * Sends a request with the key. After a 401 it asks for one and sends the request again.
 *
 * @returns the response, whose status is below 400
 */
export async function call(path, { quiet = false, ...options } = {}) {
  const sent = key();
  const headers = { ...options.headers, ...(sent ? { Authorization: `Bearer ${sent}` } : {}) };
  let response;
  try {
    response = await fetch(new URL(path, BASE), { ...options, headers, redirect: "error", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The service does not answer.");
  }
  if (response.ok) return response;
  const problem = await problemOf(response);
  if (response.status !== 401) throw problem;
  showKeyButton(() => onNewKey());
  // Another call may have been given a key meanwhile.
  if (key() && key() !== sent) return call(path, { quiet, ...options });
  if (quiet) throw problem;
  const reason = sent ? "The key is not valid any longer, or never was." : "This service asks for a key.";
  if (!(await askForKey(reason))) throw problem;
  return call(path, { quiet, ...options });
}

async function problemOf(response) {
  try {
    const { title, detail, errors = [] } = await response.json();
    return new Problem(detail || title, response.status, errors);
  } catch {
    return new Problem(`The service answers ${response.status} ${response.statusText}.`, response.status);
  }
}

export async function get(path, options) {
  return (await call(path, options)).json();
}

export async function getText(path, options) {
  return (await call(path, options)).text();
}
