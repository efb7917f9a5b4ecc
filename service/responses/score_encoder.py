"""The response of `POST /score` as JSON."""

from collections.abc import Iterator
from typing import Any

import orjson

from deployments.protocols import ScoredPrompt
from rollout_client.contract import PolicyVersions, SampleError
from service.rollout_requests.json_encoder import PART_BYTES, pieces


class ScoreEncoder:
    """Encodes each score as soon as it is there, so that little work is left after the last one."""

    media_type = "application/json"

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._encoded: dict[int, bytes] = {}
        """JSON of each score by position."""

    def add(self, position: int, start: int, score: ScoredPrompt | SampleError) -> None:
        """`start` is the first position of the sequence that was asked for."""
        self._encoded[position] = orjson.dumps(fields_of(score, start, self._top_k))

    def body(self, request_id: str, policy: PolicyVersions) -> Iterator[bytes]:
        """The scores in order of their positions, in parts."""
        summary = orjson.dumps({"request_id": request_id, "policy": policy.model_dump()})
        part = bytearray(summary.removesuffix(b"}") + b',"scores":[')
        for position, score in sorted(self._encoded.items()):
            part += b"," + score if position else score
            if len(part) >= PART_BYTES:
                yield from pieces(part)
                part.clear()
        yield bytes(part + b"]}")


def fields_of(score: ScoredPrompt | SampleError, start: int, top_k: int) -> dict[str, Any]:
    """The fields of a `SequenceScore`."""
    if isinstance(score, SampleError):
        return {"logprobs": None, "weight_version": None, "error": score.model_dump()}
    # Nothing comes before the first token.
    unknown = [] if start else [None]
    fields: dict[str, Any] = {"logprobs": unknown + list(score.prompt_logprobs), "weight_version": score.weight_version}
    if top_k:
        fields["top_token_ids"] = unknown + rows(list(score.top_token_ids), top_k)
        fields["top_logprobs"] = unknown + rows(list(score.top_logprobs), top_k)
    return fields


def rows(values: list[Any], length: int) -> list[Any]:
    return [values[begin : begin + length] for begin in range(0, len(values), length)]
