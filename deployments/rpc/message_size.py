"""Bounds of what one message between replicas carries: a batch above them is divided into several messages.

A large message holds the event loops of both ends while it is packed and unpacked, and gRPC refuses a message above
`RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH`. Sizes are estimates: only packing a message tells its size.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import orjson

from deployments.failures import RolloutFailure
from deployments.protocols.environments import StepRequest
from deployments.protocols.generation import Generation, GenerationRequest, ScoredPrompt
from deployments.protocols.model_server import ServedPart, ServedRequest
from rollout_env import ChatMessage, StepOutcome

Item = TypeVar("Item")

MOST_BYTES_PER_MESSAGE = 3 * 2**20
"""Below gRPC's own default of 4 MiB. A single request or result that is larger is a message of its own."""
MOST_ITEMS_PER_MESSAGE = 512
"""Packing so many short requests takes about 5 ms."""
BYTES_PER_TOKEN_ID = 4
BYTES_PER_LOGPROB = 4
BYTES_PER_RECORD = 200
"""Size of a request or a result without its texts and tokens."""


def divided(
    items: list[Item], bytes_of: Callable[[Item], int], most_items: int | None = MOST_ITEMS_PER_MESSAGE
) -> Iterator[list[Item]]:
    """Divides the items, in their order, into messages within both bounds, each as large as they allow.

    A single item above `MOST_BYTES_PER_MESSAGE` is a message of its own. No bound of the count if `most_items` is None.
    """
    if len(items) == 1:
        yield items
        return
    message: list[Item] = []
    message_bytes = 0
    for item in items:
        item_bytes = bytes_of(item)
        is_full = message_bytes + item_bytes > MOST_BYTES_PER_MESSAGE or len(message) == most_items
        if message and is_full:
            yield message
            message, message_bytes = [], 0
        message.append(item)
        message_bytes += item_bytes
    if message:
        yield message


def bytes_of_generation_request(request: GenerationRequest) -> int:
    stop_strings = sum(map(bytes_of_text, request.stop_strings))
    return BYTES_PER_RECORD + BYTES_PER_TOKEN_ID * len(request.prompt_token_ids) + stop_strings


def bytes_of_served_request(request: ServedRequest) -> int:
    return BYTES_PER_RECORD + len(request.body)


def bytes_of_served_part(part: tuple[str, ServedPart]) -> int:
    return BYTES_PER_RECORD + len(part[1].body)


def bytes_of_step_request(request: StepRequest) -> int:
    return BYTES_PER_RECORD + bytes_of_json((request.message_log, request.extra_env_info))


def bytes_of_conversation(messages: Sequence[ChatMessage]) -> int:
    return BYTES_PER_RECORD + bytes_of_json(messages)


def bytes_of_generation(result: Generation | RolloutFailure) -> int:
    if isinstance(result, RolloutFailure):
        return BYTES_PER_RECORD + bytes_of_text(str(result))
    tokens = len(result.token_ids)
    if isinstance(result, ScoredPrompt):
        tokens = len(result.prompt_logprobs) + len(result.top_token_ids)
    return BYTES_PER_RECORD + (BYTES_PER_TOKEN_ID + BYTES_PER_LOGPROB) * tokens


def bytes_of_step_result(result: StepOutcome | RolloutFailure) -> int:
    if isinstance(result, RolloutFailure):
        return BYTES_PER_RECORD + bytes_of_text(str(result))
    texts = sum(bytes_of_text(message["content"]) for message in result.observations)
    texts += bytes_of_text(result.answer or "")
    if result.metadata is None and result.next_stop_strings is None:
        return BYTES_PER_RECORD + texts
    return BYTES_PER_RECORD + texts + bytes_of_json((result.metadata, result.next_stop_strings))


def bytes_of_text(text: str) -> int:
    """An upper bound: without a pass over the text."""
    return len(text) if text.isascii() else 4 * len(text)


def bytes_of_json(value: Any) -> int:
    try:
        return len(orjson.dumps(value))
    except TypeError:
        # orjson writes neither integers of more than 64 bits nor lone surrogates, which JSON may hold.
        return len(pickle.dumps(value))
