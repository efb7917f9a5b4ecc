// Whether the text of the editor is a sample that can be posted. Pure functions. The service has the last word; this
// finds what it would refuse before a request is sent.

import { firstFlaw } from "./json_place.js";

const ROLES = ["system", "user", "assistant", "tool", "environment"];

/** `{sample}`, or `{problem}`: a sentence that names the place. */
export function readSample(text, tasks) {
  let sample;
  try {
    sample = JSON.parse(text);
  } catch {
    const { line, column, wanted } = firstFlaw(text);
    return { problem: `This is no JSON: line ${line}, column ${column}: ${wanted} is expected.` };
  }
  const problem = sampleProblem(sample, tasks);
  return problem ? { problem } : { sample };
}

function sampleProblem(sample, tasks) {
  if (sample === null || typeof sample !== "object" || Array.isArray(sample)) return "A sample is a JSON object.";
  const task = tasks.find((one) => one.task_name === sample.task_name);
  if (!task) return `task_name: the service has no task ${JSON.stringify(sample.task_name ?? null)}.`;
  if (sample.messages && sample.message_log) return "messages and message_log are both given: send the one that is the prompt.";
  for (const name of ["messages", "message_log"]) {
    const problem = messagesProblem(sample[name], name);
    if (problem) return problem;
  }
  return fieldsProblem(sample.extra_env_info ?? {}, task.fields);
}

function messagesProblem(messages, name) {
  if (messages === undefined || messages === null) return null;
  if (!Array.isArray(messages) || !messages.length) return `${name}: a list with at least one message.`;
  for (const [at, message] of messages.entries()) {
    if (!ROLES.includes(message?.role)) return `${name}[${at}].role: one of ${ROLES.join(", ")}.`;
    if (name === "message_log" && !Array.isArray(message.token_ids)) return `${name}[${at}].token_ids: a list of token ids.`;
    const isCall = message.tool_calls?.length > 0;
    if (typeof message.content !== "string" && !Array.isArray(message.content) && !isCall) return `${name}[${at}].content: a text.`;
  }
  return null;
}

const TYPES = {
  string: (value) => typeof value === "string",
  number: (value) => typeof value === "number",
  integer: Number.isInteger,
  boolean: (value) => typeof value === "boolean",
  array: Array.isArray,
  object: (value) => value !== null && typeof value === "object" && !Array.isArray(value),
  null: (value) => value === null,
};

/** Looks at the required fields of a task's JSON schema and at the types of those that are given. */
function fieldsProblem(info, schema = {}) {
  if (!TYPES.object(info)) return "extra_env_info: a JSON object.";
  for (const name of schema.required ?? []) {
    if (!(name in info)) return `extra_env_info.${name}: the task needs it.`;
  }
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    if (name in info && typeof field?.type === "string" && TYPES[field.type] && !TYPES[field.type](info[name])) {
      return `extra_env_info.${name}: a value of the type ${field.type}.`;
    }
  }
  return null;
}
