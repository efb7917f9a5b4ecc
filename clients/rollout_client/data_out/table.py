"""Rollouts as an Arrow table that loses nothing, for Parquet files. Needs the extra `arrow`.

The columns are those of the wire (`rollout_client.arrow.schema.ROLLOUTS`), with the numbers of each message. Metrics
also say how the last response ended; that follows from the messages and is not read back.
Log-probabilities have 64 bits, because JSON has them: 32 would change them. The schema's metadata hold the
`RolloutSummary` as JSON, under `summary`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollout_client.contract.base import set_fields
from rollout_client.contract.rollouts import RolloutSummary, SampleResult
from rollout_client.data_out.response_parts import AnyResponse, parts_of
from rollout_client.errors import needed_for
from rollout_client.results import is_clipped, last_finish_reason

with needed_for("Arrow", "arrow"):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rollout_client.arrow.rows import record_batch, rows_of
    from rollout_client.arrow.schema import FURTHER_FIELDS, MESSAGE_FIELDS, METRICS, ROLLOUTS, SUMMARY, TOKEN_IDS

MESSAGE = pa.struct(
    [
        *MESSAGE_FIELDS,
        pa.field("token_ids", TOKEN_IDS),
        pa.field("generation_logprobs", pa.list_(pa.float64())),
        FURTHER_FIELDS,
    ]
)
FIELDS = pa.schema(
    [pa.field("message_log", pa.list_(MESSAGE)) if field.name == "message_log" else field for field in ROLLOUTS]
)
"""Columns that are read back."""
ENDING = [pa.field("finish_reason", pa.string()), pa.field("clipped", pa.bool_())]
COLUMNS = pa.schema(
    [pa.field("metrics", pa.struct([*ENDING, *METRICS])) if field.name == "metrics" else field for field in FIELDS]
)
"""The columns of `to_arrow` and of Parquet files. A null means that the field is absent."""
ROWS_OF_A_BATCH = 1024
"""Bounds the arrays of a batch: one holds at most 2^31 numbers, or 2 GiB of text."""


def arrow_table(response: AnyResponse) -> pa.Table:
    summary, samples = parts_of(response)
    parts = (samples[begin : begin + ROWS_OF_A_BATCH] for begin in range(0, len(samples), ROWS_OF_A_BATCH))
    batches = [record_batch([_row_of(sample) for sample in part], COLUMNS) for part in parts]
    metadata = {SUMMARY: summary.model_dump_json(exclude_unset=True)}
    return pa.Table.from_batches(batches, COLUMNS).replace_schema_metadata(metadata)


def _row_of(sample: SampleResult) -> dict[str, Any]:
    ending: dict[str, Any] = {"clipped": is_clipped(sample)}
    if (reason := last_finish_reason(sample)) is not None:
        ending["finish_reason"] = reason
    return {**set_fields(sample), "metrics": {**set_fields(sample.metrics), **ending}}


def write_parquet(response: AnyResponse, path: Path) -> None:
    pq.write_table(arrow_table(response), path, compression="zstd")


def read_parquet(path: Path) -> Iterator[RolloutSummary | SampleResult]:
    """The summary of a Parquet file, if it has one, then its rollouts.

    Raises `ValueError` if it is not a Parquet file of rollouts, or at a row that is not one.
    """
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error
    missing = [name for name in ("message_log", "status", "metrics") if name not in file.schema_arrow.names]
    if missing:
        raise ValueError(f"{path} is not a file of rollouts: it has no column {', '.join(missing)}.")
    text = (file.schema_arrow.metadata or {}).get(SUMMARY)
    if text is not None:
        yield RolloutSummary.model_validate_json(text)
    row_number = 0
    for batch in file.iter_batches(ROWS_OF_A_BATCH):
        for row in rows_of(pa.Table.from_batches([batch]), FIELDS):
            row_number += 1
            try:
                yield SampleResult.model_validate(row)
            except ValidationError as error:
                raise ValueError(f"{path} row {row_number} is not a rollout: {error.errors()[0]['msg']}.") from error
