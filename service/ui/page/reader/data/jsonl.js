// Reads files of JSON lines: those of `rollout run`, of `response.save`, a saved NDJSON stream, a saved JSON answer.
// A rollout is kept as its place in the file and parsed again when it is shown, so that a large file needs little memory.

const NEWLINE = 10;
const decoder = new TextDecoder();

/** Yields `{text, start, end}` of each line that is not empty, in bytes of the file. */
export async function* linesOf(file) {
  let rest = new Uint8Array(0);
  let restStart = 0;
  for await (const chunk of chunksOf(file)) {
    let bytes = chunk;
    if (rest.length) {
      bytes = new Uint8Array(rest.length + chunk.length);
      bytes.set(rest);
      bytes.set(chunk, rest.length);
    }
    let from = 0;
    // What was looked through already holds no end of a line.
    for (let at = bytes.indexOf(NEWLINE, rest.length); at >= 0; at = bytes.indexOf(NEWLINE, from)) {
      if (at > from) yield line(bytes, from, at, restStart);
      from = at + 1;
    }
    rest = bytes.slice(from);
    restStart += from;
  }
  if (rest.length) yield line(rest, 0, rest.length, restStart);
}

function line(bytes, from, to, fileStart) {
  return { text: decoder.decode(bytes.subarray(from, to)), start: fileStart + from, end: fileStart + to };
}

async function* chunksOf(file) {
  const reader = file.stream().getReader();
  for (let read = await reader.read(); !read.done; read = await reader.read()) yield read.value;
}

/** Yields `{rollout, place}`, `{summary}` or `{flaw}` for what the lines of `file` hold. */
export async function* readJsonLines(file) {
  let number = 0;
  for await (const { text, start, end } of linesOf(file)) {
    number += 1;
    let value;
    try {
      value = JSON.parse(text);
    } catch (error) {
      if (text.trim()) yield { flaw: `line ${number} is no JSON: ${error.message}` };
      continue;
    }
    if (value?.summary && !value.message_log) {
      yield { summary: value.summary };
    } else if (value?.samples && !value.message_log) {
      const { samples, ...summary } = value;
      for (const rollout of samples) yield { rollout, where: `line ${number}` };
      yield { summary };
    } else if (value?.sample) {
      yield { rollout: value.sample, where: `line ${number}` };
    } else {
      yield { rollout: value, where: `line ${number}`, place: { start, end } };
    }
  }
}

/** The rollout at a place that `readJsonLines` gave. */
export async function rolloutAt(file, place) {
  return JSON.parse(await file.slice(place.start, place.end).text());
}
