"""Writes the Arrow body of `POST /rollout`, which `service/rollout_requests/arrow_body.py` reads.

The samples are columns; the other fields of the request are JSON in the schema's metadata.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pydantic import BaseModel
from pydantic_core import to_json

from rollout_client.arrow.rows import record_batch
from rollout_client.arrow.schema import FURTHER_FIELDS, REQUEST, SAMPLES
from rollout_client.contract.rollouts import SampleInput
from rollout_client.set_fields import set_fields


def arrow_body(samples: Sequence[SampleInput | Mapping[str, Any]], options: Mapping[str, object]) -> bytes:
    """Raises `ValueError` if a value does not fit its column, or is not JSON."""
    rows = [set_fields(sample) if isinstance(sample, BaseModel) else sample for sample in samples]
    names = {FURTHER_FIELDS.name}.union(*rows)
    schema = pa.schema([field for field in SAMPLES if field.name in names], {REQUEST: to_json(options)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(record_batch(rows, schema))
    body: bytes = sink.getvalue().to_pybytes()
    return body
