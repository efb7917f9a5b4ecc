"""The records of an episode: its identity, start, limits and state, and the seeds of a repeatable request.

`service/rollout_requests/episodes.py` makes them. Each sample, rollout and turn of a repeatable request samples with a
seed derived from the one above it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self

from pydantic import JsonValue

from deployments.protocols.chat import ChatOptions
from deployments.protocols.generation import (
    NO_COLUMNS,
    UNNAMED_REQUEST,
    Generation,
    IncludedColumns,
    RequestShare,
    SamplingOptions,
    derived_seed,
    packed_ids,
)
from deployments.protocols.images import ImageSpan, image_spans
from deployments.protocols.token_columns import RoutedExperts
from rollout_client.contract.messages import Branch, Message, PromptMessage
from rollout_client.contract.rollouts import SampleError, SampleInput, SampleStatus
from rollout_client.results import turns_of
from service.rollouts.metrics import MetricCounts
from service.rollouts.staleness import VersionBounds, oldest_version


def sampling_of_turn(sampling: SamplingOptions, turn: int, tokens: int = 0) -> SamplingOptions:
    """The rollout's sampling options with the seed of one turn, numbered from 0.

    A generation that goes on after `tokens` tokens of the turn has a seed of its own: with that of the turn it would
    repeat the draws of the first tokens.
    """
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=derived_seed(sampling.seed, turn, *((tokens,) if tokens else ())))


@dataclass(frozen=True, slots=True)
class EpisodeIdentity:
    """Which rollout of which sample an episode is, and the fields of the sample that come back unchanged.

    `position` is the episode's place in the response and `group` its sample's place in the request, both from 0; `idx`
    is the sample's number as the caller sees it. Within its group the episode is number `generation_index`.
    """

    request_id: str
    position: int
    group: int
    generation_index: int
    idx: int
    task_name: str
    id: str | None = None
    parent: str | None = None
    """The rollout that it was forked from."""
    further_fields: dict[str, Any] = field(default_factory=dict)
    unique_request_id: str = ""
    """Differs between any two requests, while callers may use one `request_id` twice; by default `request_id`."""

    @property
    def rollout_id(self) -> str:
        """Unique among all rollouts of all requests."""
        return f"{self.unique_request_id or self.request_id}-{self.position}-{self.generation_index}"

    @property
    def group_id(self) -> str:
        """Unique among all groups of all requests."""
        return f"{self.unique_request_id or self.request_id}-{self.group}"

    def log_fields(self) -> dict[str, Any]:
        """The `extra` of a log record that concerns this rollout."""
        return {
            "request_id": self.request_id,
            "rollout_id": self.rollout_id,
            "task_name": self.task_name,
            "sample": self.idx,
            "generation_index": self.generation_index,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The message log with which the episodes of a group begin. All of them refer to this one; none changes it."""

    messages: tuple[Message, ...]
    """Messages to which nothing is added."""
    response: Message | None
    """The response after them that no environment has stepped yet: whole, or partial and to be gone on with."""
    token_ids: "array[int]"
    """The token ids of all of these messages, concatenated."""
    turns: int
    """How many of `messages`, and of the logs that the rollout has left, were generated."""
    oldest_version: int | None = None
    """The oldest one of the request's policy that generated a token of these messages; `None` if none is known."""
    images: tuple[ImageSpan, ...] = ()
    """Those that the messages show."""
    given: Sequence[PromptMessage] = ()
    """Those messages that were posted without tokens, as the template takes them: a log has no parts of messages."""
    left: Sequence[Branch] = ()
    """The logs that the rollout has left before."""

    @property
    def end(self) -> dict[str, int]:
        """The fields of a `ForkPoint`: where a rollout that begins with this leaves the one that it is a part of."""
        is_whole = self.response is not None and self.response.finish_reason is not None
        return {"turn": self.turns + is_whole, "token": len(self.token_ids)}

    @classmethod
    def of(cls, log: Sequence[Message], policy: str | None = None, sample: SampleInput | None = None) -> Self:
        """The prompt of this log; `policy` is the name of the one that the request is about."""
        logs = [*(branch.message_log for branch in (sample.branches if sample else ())), log]
        ends_with_response = bool(log) and log[-1].generation_logprobs is not None
        messages = tuple(log[:-1] if ends_with_response else log)
        return cls(
            messages,
            log[-1] if ends_with_response else None,
            packed_ids(token_id for message in log for token_id in message.token_ids),
            len({turn for turns in turns_of(logs) for turn in turns.values()}) - ends_with_response,
            oldest_version([*chain.from_iterable(logs)], policy),
            image_spans(log),
            (sample and sample.messages) or (),
            sample.branches if sample else (),
        )


@dataclass(frozen=True, slots=True)
class ServiceBuild:
    """The software that plays: all results of an ingress replica have the same."""

    service_version: str = ""
    engine: str = ""
    """`GeneratorDescription.settings_hash`."""


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """The state in which the episodes of a group begin; only the seed of `sampling` can be one episode's own."""

    prompt: Prompt
    extra_env_info: dict[str, Any]
    stop_strings: tuple[str, ...]
    sampling: SamplingOptions
    chat: ChatOptions
    min_weight_version: int = 0
    bounds: VersionBounds = field(default_factory=VersionBounds)
    """Is the same object in all episodes of a request."""
    renders: bool = False
    """Whether the request's `history` is `template`."""
    share: RequestShare = UNNAMED_REQUEST
    include: IncludedColumns = NO_COLUMNS
    """Is the same object in all episodes of a request."""
    build: ServiceBuild = ServiceBuild()
    """Is the same object in all episodes."""
    keeps_states: bool = False
    """Whether the states of the environment are kept by turn, so that the rollout can be forked at any of them."""
    forks_sessions: bool = False
    """Whether the environment can open a session that stands where a posted log with turns ends."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Bounds of one episode, lengths in tokens.

    `max_seq_len` bounds the whole message log, `max_new_tokens` each generation (`None`: only `max_seq_len` does).
    `max_rollout_turns` bounds the turns, those of the message log that was posted included. `retries` bounds how many
    calls of the episode are retried after a failure of the fleet.
    """

    max_seq_len: int
    max_new_tokens: int | None
    max_rollout_turns: int
    retries: int = 0


@dataclass(frozen=True, slots=True)
class PlayedGeneration:
    """Tokens `[start, end)` of a message that one generation made, and what is known of how. Times are in seconds."""

    message: int
    """Index of the message among those that were added to the log."""
    start: int
    end: int
    replica: str
    """Empty if it is not known."""
    stop_strings: tuple[str, ...]
    cached_tokens: int
    batch_size: int
    """0 if it is not known."""
    waited_s: float
    took_s: float
    began_at: float
    """When it began to wait, in seconds since 1970; 0 if it is not known."""

    @classmethod
    def of(cls, generation: Generation, message: int, start: int, stop_strings: tuple[str, ...]) -> Self:
        return cls(
            message,
            start,
            start + len(generation.token_ids),
            generation.replica,
            stop_strings,
            generation.cached_tokens,
            generation.batch_size,
            generation.waited_s,
            generation.took_s,
            generation.began_at,
        )


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """A step of the environment."""

    turn: int
    """Number of the turn that it judged, from 0 in this log."""
    began_at: float
    """In seconds since 1970."""
    took_s: float


@dataclass(frozen=True, slots=True)
class TurnState:
    """The state of the environment in which turn `turn` begins."""

    turn: int
    extra_env_info: dict[str, JsonValue]
    stop_strings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EpisodeState:
    """One episode at the end of a turn."""

    messages: list[Message]
    """Messages after the prompt's, from some index on."""
    left: list[Branch]
    """The logs before this one, from some on. Of another log than the first all messages are in `messages`."""
    extra_env_info: dict[str, JsonValue]
    stop_strings: tuple[str, ...]
    rewards: dict[str, float]
    answer: str | None
    metrics: MetricCounts
    terminated: bool
    truncated: bool
    steps: int
    restarts: int
    retries_left: int
    status: SampleStatus | None
    error: SampleError | None
    experts: RoutedExperts | None
    """Those of the whole log, prompt included; `None` before the end of the episode, which has more of them then."""
    staleness: int | None
    """At its end, in versions; `None` before it, or if it is not known."""
    generations: tuple[PlayedGeneration, ...] = ()
    """Those of `messages`."""
    before: tuple[TurnState, ...] = ()
    """The states of the environment before this one, after that at the prompt, where they are known."""

    @property
    def turn_state(self) -> TurnState:
        return TurnState(self.steps, self.extra_env_info, self.stop_strings)


def replay_fields(
    start: EpisodeStart, limits: EpisodeLimits, generations: Sequence[PlayedGeneration], first_added: int
) -> dict[str, Any] | None:
    """The fields of a `ReplayRecord`, as JSON has them; `None` if the request has generated nothing itself.

    Args:
        first_added: index in the log of the first message that was added.
    """
    if not generations:
        return None
    sampling, before = start.sampling, tuple[str, ...]()
    origins = []
    for made in generations:
        origin: dict[str, Any] = {
            "message": first_added + made.message,
            "start": made.start,
            "end": made.end,
            "replica": made.replica,
        }
        if made.stop_strings != before:
            origin["stop_strings"] = list(made.stop_strings)
        before = made.stop_strings
        origins.append(origin)
    return {
        "service_version": start.build.service_version,
        "engine": start.build.engine,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "ignore_eos": sampling.ignore_eos,
        "seed": sampling.seed,
        "max_seq_len": limits.max_seq_len,
        "max_new_tokens": limits.max_new_tokens,
        "generations": origins,
    }
