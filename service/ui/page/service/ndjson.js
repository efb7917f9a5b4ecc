// Plays samples, and reads the lines of the answer as they arrive. Counterpart: service/rollout_requests/result_encoding.py.

import { call, Problem } from "./api.js";

/** Yields `{position, sample}` of each rollout when it has ended, then `{summary}`. Throws a `Problem` otherwise. */
export async function* play(body, signal) {
  const response = await call("rollout", {
    method: "POST",
    headers: { "Content-Type": "application/json", Accept: "application/x-ndjson", Prefer: "heartbeat=15" },
    body: JSON.stringify(body),
    signal,
  });
  let isWhole = false;
  for await (const line of lines(response.body)) {
    const read = JSON.parse(line);
    if (read.problem) throw new Problem(read.problem.detail || read.problem.title, read.problem.status, read.problem.errors);
    isWhole ||= Boolean(read.summary);
    yield read;
  }
  if (!isWhole) throw new Problem("The stream ended early: the connection or the service broke.");
}

/** Empty lines are heartbeats. */
async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    const parts = (rest + read.value).split("\n");
    rest = parts.pop();
    for (const part of parts) if (part) yield part;
  }
  if (rest) yield rest;
}
