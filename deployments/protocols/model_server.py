"""Records that travel between the ingress and a generator's replica for calls of model servers' APIs.

The ingress passes bytes on: the replica parses, renders and generates with vLLM's own serving layers
(`deployments/generation/serving`). `RemoteGenerator` (`service/remote/generator.py`) is the caller.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from deployments.failures import RolloutFailure
from deployments.protocols.generation import GenerationRequest
from deployments.protocols.replicas import ReplicaLoad
from rollout_client.contract.rollouts import Sampling

Endpoint = Literal[
    "chat/completions",
    "completions",
    "responses",
    "messages",
    "messages/count_tokens",
    "models",
    "tokenize",
    "detokenize",
    "generate",
    "inference/v1/generate",
]
TOKEN_ENDPOINTS: tuple[Endpoint, ...] = ("generate", "inference/v1/generate")
"""The endpoints whose prompts and answers are token ids: SGLang's and vLLM's."""
GENERATED: tuple[Endpoint, ...] = ("chat/completions", "completions", "responses", "messages", *TOKEN_ENDPOINTS)
"""The endpoints whose calls generate."""
WITH_SEVERAL_PROMPTS: tuple[Endpoint, ...] = ("completions", "generate")
"""The endpoints whose calls may have several prompts."""
BYTES_PER_TOKEN = 4
"""Bytes of a body for each token, about: only the replica knows how many tokens a prompt has."""


@dataclass(frozen=True, slots=True)
class ServedRequest(GenerationRequest):
    """A call of a model server's API. Its prompt is in its body, so that `prompt_token_ids` has a guessed length."""

    endpoint: Endpoint = "chat/completions"
    body: bytes = b""
    choices: int = 1
    """How many answers its body asks for: the engine generates each one."""
    session_id: str | None = None
    """The session that records the call; `None` for a call of its own."""
    session_sampling: Sampling | None = None
    """How tokens are sampled where a call of a session does not say."""
    generation_index: int = 0
    """Index of the session in its group."""
    ingress: str = ""
    """The process that received it."""
    received_at: float = 0.0
    """When that was, by the monotonic clock of that process, which no other one can read."""
    age_s: float = 0.0
    """Seconds from then until it was sent to a replica."""
    arrived_at: float = 0.0
    """When it came there, by the monotonic clock of the replica."""


@dataclass(frozen=True, slots=True)
class CallsToAbort:
    """Calls of SGLang's API that shall end with the tokens that they have."""

    key: str | None
    """The name of their caller's key; `None` for callers without one."""
    rid: str
    """The beginning of their request ids; empty for all of them."""
    ingress: str
    """The process that received the abort."""
    until: float
    """When that was, by the monotonic clock of that process."""


@dataclass(frozen=True, slots=True)
class ServedTokens:
    """Tokens that a call took of the engine."""

    prompt: int = 0
    """In a session those that it did not have."""
    generated: int = 0
    context: int = 0
    """All tokens of the prompt."""
    cached: int = 0
    """Those of the prompt that the engine found in its prefix cache."""


@dataclass(frozen=True, slots=True)
class ServedPart:
    """A part of an answer, in order."""

    body: bytes = b""
    status: int | None = None
    """Status of the answer; the first part has it."""
    media_type: str = ""
    """Beside the status."""
    tokens: ServedTokens | None = None
    """The last part has it."""


@dataclass(frozen=True, slots=True)
class ServedParts:
    """One item of the stream that answers a batch of calls; one without parts and results is a heartbeat."""

    parts: list[tuple[str, ServedPart]]
    """Each with the `generation_id` of its call."""
    results: list[tuple[int, ServedTokens | RolloutFailure]]
    """Results of the calls that end with these parts, each with its index in the batch."""
    load: ReplicaLoad
    """The load of the replica after these parts."""


class ModelServer(Protocol):
    """Answers calls of model servers' APIs. `RemoteGenerator` implements it."""

    def serve(self, request: ServedRequest) -> AsyncGenerator[ServedPart, None]:
        """Yields the answer as it is made. Closing the generator aborts the call.

        Raises before the first part:
            RolloutFailure: no replica could answer.
        """

    async def abort_calls(self, calls: CallsToAbort) -> None:
        """Ends calls with the tokens that they have, also those that have not reached a replica yet.

        Raises:
            GenerationLost: no replica answers.
        """

    def release(self, rollout_id: str) -> None:
        """Forgets the party of calls of this `rollout_id`. Unknown ids are ignored."""


def public_model_name(model: str) -> str:
    """The name of a folder without its path; the whole name of a repository."""
    path = Path(model)
    return path.name if path.is_absolute() else model
