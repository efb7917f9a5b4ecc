"""The response of `POST /rollout` as JSON. Serializes only fields that were set; explicit nulls survive."""

from array import array
from collections.abc import Iterator

import orjson
from pydantic import BaseModel

from rollout_client.contract import RolloutSummary, SampleResult
from rollout_client.set_fields import set_fields
from service.responses.encoder import ResponseEncoder

JSON = "application/json"
PART_BYTES = 2**20
"""Large enough that passing a part on costs nothing, small enough that the next one is made while it is being sent."""


class JsonResponseEncoder(ResponseEncoder):
    media_type = JSON

    def __init__(self) -> None:
        self._encoded: dict[int, bytes] = {}
        """JSON of each rollout by position."""

    def add(self, position: int, result: SampleResult) -> None:
        self._encoded[position] = json_of(result)

    def body(self, summary: RolloutSummary) -> Iterator[bytes]:
        part = bytearray(json_of(summary).removesuffix(b"}") + b',"samples":[')
        for position, sample in sorted(self._encoded.items()):
            part += b"," + sample if position else sample
            if len(part) >= PART_BYTES:
                yield from pieces(part)
                part.clear()
        yield bytes(part + b"]}")


def pieces(data: bytes | bytearray) -> Iterator[bytes]:
    """`data` in parts of at most `PART_BYTES`: sending more at once would keep the event loop from other requests."""
    for begin in range(0, len(data), PART_BYTES):
        yield bytes(data[begin : begin + PART_BYTES])


def json_of(model: BaseModel) -> bytes:
    """Encodes with orjson, in half of pydantic's time; with pydantic if an integer has more than 64 bits."""
    try:
        return orjson.dumps(model, default=plain)
    except orjson.JSONEncodeError:
        return model.model_dump_json(exclude_unset=True, fallback=plain, warnings=False).encode()


def plain(value: object) -> object:
    """What an encoder writes in place of `value`; raises `TypeError` if JSON has no form for it."""
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, BaseModel):
        return set_fields(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
