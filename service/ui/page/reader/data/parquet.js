// Reads Parquet files of rollouts, as `response.save` writes them: one row a rollout, the columns of
// `rollout_client.data_out.table.COLUMNS`. A null there means that the field is absent.

import { decompress } from "../../vendor/fzstd/fzstd.js";
import { parquetMetadataAsync } from "../../vendor/hyparquet/metadata.js";
import { parquetReadObjects } from "../../vendor/hyparquet/read.js";

const JSON_COLUMNS = ["extra_env_info", "tools", "chat_template_kwargs"];
const NEEDED = ["message_log", "status"];
const ROWS_OF_A_PART = 1024;
const NULL_MATTERS = new Set(["total_reward"]);
// hyparquet itself knows Snappy; zstd is what our client writes.
const compressors = { ZSTD: (input, outputLength) => decompress(input, new Uint8Array(outputLength)) };

/** Yields `{rollout}`, `{summary}` or `{flaw}`. Throws an `Error` with a sentence if it is no Parquet file of rollouts. */
export async function* readParquet(file) {
  const buffer = {
    byteLength: file.size,
    slice: (start, end) => file.slice(start, end).arrayBuffer(),
  };
  const metadata = await metadataOf(buffer);
  const columns = new Set(metadata.schema.map((element) => element.name));
  const missing = NEEDED.filter((name) => !columns.has(name));
  if (missing.length) throw new Error(`it has no column ${missing.join(", ")}`);
  let begin = 0;
  for (const group of metadata.row_groups) {
    // A row group is decoded whole anyway, so it is read whole; handed on in parts.
    const end = begin + Number(group.num_rows);
    const rows = await parquetReadObjects({ file: buffer, metadata, compressors, rowStart: begin, rowEnd: end });
    for (let at = 0; at < rows.length; at += 1) {
      yield { rollout: rolloutOf(rows[at]), where: `row ${begin + at + 1}` };
      rows[at] = undefined;
      if (at % ROWS_OF_A_PART === ROWS_OF_A_PART - 1) await null;
    }
    begin = end;
  }
  const summary = metadata.key_value_metadata?.find(({ key }) => key === "summary")?.value;
  if (summary) yield { summary: JSON.parse(summary) };
}

async function metadataOf(buffer) {
  try {
    return await parquetMetadataAsync(buffer);
  } catch (error) {
    throw new Error(`it is no Parquet file: ${error.message}`);
  }
}

/** A row as the rollout that it was written from. */
export function rolloutOf(row) {
  const rollout = plain(row);
  for (const name of JSON_COLUMNS) {
    if (typeof rollout[name] === "string") rollout[name] = JSON.parse(rollout[name]);
  }
  if (!("total_reward" in rollout)) rollout.total_reward = null;
  return rollout;
}

/** Numbers for big integers, no nulls, and the fields of `further_fields` beside the others. */
export function plain(value) {
  if (typeof value === "bigint") return Number(value);
  if (ArrayBuffer.isView(value)) return Array.from(value, Number);
  if (Array.isArray(value)) return value.map(plain);
  if (value === null || typeof value !== "object") return value;
  const object = {};
  for (const [name, field] of Object.entries(value)) {
    if (name === "further_fields") Object.assign(object, typeof field === "string" ? JSON.parse(field) : (field ?? {}));
    else if ((field !== null && field !== undefined) || NULL_MATTERS.has(name)) object[name] = plain(field);
  }
  return object;
}
