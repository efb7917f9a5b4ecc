"""Whether a call of a model server's API asks for its answer as a stream of events."""

import asyncio

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

FIELD = "stream"
FIELD_IN_JSON = b'"stream"'
MOST_BYTES_INLINE = 2**16
as_vllm_reads_it: TypeAdapter[bool | None] = TypeAdapter(bool | None)


async def asks_for_stream(body: bytes) -> bool:
    """What `stream` of the body says; false for a body that vLLM refuses, and for a name that is written in escapes."""
    if FIELD_IN_JSON not in body:
        return False
    if len(body) <= MOST_BYTES_INLINE:
        return says_stream(body)
    return await asyncio.to_thread(says_stream, body)


def says_stream(body: bytes) -> bool:
    try:
        fields = from_json(body)
        return bool(as_vllm_reads_it.validate_python(fields.get(FIELD))) if isinstance(fields, dict) else False
    except (ValueError, ValidationError):
        return False
