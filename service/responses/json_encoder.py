"""The answer of `POST /rollout` as JSON. Only what was set is said: what came as null goes back as null."""

from array import array
from collections.abc import Iterator

import orjson
from pydantic import BaseModel

from rollout_client.contract import RolloutSummary, SampleResult
from rollout_client.set_fields import set_fields
from service.responses.encoder import ResponseEncoder

JSON = "application/json"
PIECE_BYTES = 2**20
"""Large enough that handing it on costs nothing, small enough that the next is made while it is being sent."""


class JsonResponseEncoder(ResponseEncoder):
    """Writes each rollout when it ends, so that after the last one little is left to do."""

    media_type = JSON

    def __init__(self) -> None:
        self._written: dict[int, bytes] = {}
        """By position."""

    def add(self, position: int, result: SampleResult) -> None:
        self._written[position] = json_of(result)

    def body(self, summary: RolloutSummary) -> Iterator[bytes]:
        """The bytes of the answer, piece by piece, when every position was added."""
        piece = bytearray(json_of(summary).removesuffix(b"}") + b',"samples":[')
        for position, sample in sorted(self._written.items()):
            piece += b"," + sample if position else sample
            if len(piece) >= PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
        yield bytes(piece + b"]}")


def json_of(model: BaseModel) -> bytes:
    """By orjson, which writes a rollout in half of pydantic's time, unless the JSON is beyond it.

    It has no integers of more than 64 bits, and goes 254 levels deep.
    """
    try:
        return orjson.dumps(model, default=plain)
    except orjson.JSONEncodeError:
        return model.model_dump_json(exclude_unset=True, fallback=plain, warnings=False).encode()


def plain(value: object) -> object:
    """Raises `TypeError` for what has no JSON."""
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, BaseModel):
        return set_fields(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
