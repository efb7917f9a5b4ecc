"""Plays an environment against scripted replies, as the service plays it against a model, but without the service."""

import asyncio
from base64 import b64decode
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from rollout_env.environment import TaskEnvironment, has_a_start
from rollout_env.records import ChatMessage, StepOutcome
from rollout_env.steps import RolloutSteps, problems_of, validated_start

Sample = Mapping[str, Any]
"""A sample of a rollout request: `messages` or `message_log`, `extra_env_info`, `stop_strings`."""

Reply = str | ChatMessage
"""A reply: its text, or a message that has `tool_calls` or `reasoning_content` beside it."""

UNNAMED_REWARD = "reward"
MESSAGES = TypeAdapter(list[ChatMessage])
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply and the environment's outcome."""

    reply: str
    """The reply as the environment saw it: it ends with the first stop string that it contains."""
    stop_strings: tuple[str, ...]
    """Stop strings of this reply."""
    outcome: StepOutcome


@dataclass(frozen=True, slots=True)
class PlayResult:
    """A rollout with scripted replies. The fields are named as in the service's answer."""

    message_log: list[ChatMessage]
    """The prompt, then for each turn a reply and its observation, which may be several messages."""
    turns: list[Turn]
    rewards: dict[str, float]
    """Sums over all turns by name; a reward without a name is under `reward`."""
    total_reward: float
    """Sum of `rewards`."""
    terminated: bool
    extra_env_info: dict[str, Any]
    """State that the last step left."""
    metrics: dict[str, float]
    """Sums over all turns by name."""
    stop_strings: tuple[str, ...]
    """Stop strings that the next reply would have."""
    unused_replies: list[Reply]
    """Replies that remained when the environment terminated the rollout."""

    @property
    def outcomes(self) -> list[StepOutcome]:
        return [turn.outcome for turn in self.turns]

    @property
    def answers(self) -> list[str | None]:
        """Answers that the environment read from the replies."""
        return [turn.outcome.answer for turn in self.turns]


def play(
    environment: TaskEnvironment, replies: Sequence[Reply], sample: Sample | int | None = None, seed: int = 0
) -> PlayResult:
    """Steps the environment once for each reply, until it terminates the rollout or the replies run out.

    `extra_env_info` and outcomes are validated as the service validates them. Metadata and stop strings go from one
    step to the next, and rewards are summed, as in the service.

    Each call runs an event loop of its own, in a thread if one runs already (in a notebook). Use `aplay` for an
    environment that is tied to one loop, by an open connection for example.

    Args:
        environment: the environment, which stays open.
        replies: the model's responses, one a turn: texts, or messages with `tool_calls` or `reasoning_content` as a
            service with parsers for them has them.
        sample: a sample, or the index of one of the environment's example samples; by default the first of them.
        seed: seed of the example samples.

    Raises:
        SampleRejected: `extra_env_info` is not valid for `ExtraEnvInfo`, or the environment rejects it.
        OutcomeInvalid: a step returned no valid outcome.
        ValueError: the sample has no prompt, or one with a message that is not valid.
        TypeError: `replies` is one string.
        Exception: any other that the environment raises, unchanged.
    """
    return run(aplay(environment, replies, sample, seed))


async def aplay(
    environment: TaskEnvironment, replies: Sequence[Reply], sample: Sample | int | None = None, seed: int = 0
) -> PlayResult:
    """`play` for a running event loop: `await aplay(...)`."""
    if isinstance(replies, str):
        raise TypeError(f"replies must be a list of strings, one a turn, got one string: {replies!r}.")
    if not isinstance(sample, Mapping):
        index = sample or 0
        sample = environment.example_samples(index + 1, seed)[index]
    rollout = ScriptedRollout(sample)
    await begin(rollout, environment)
    steps = RolloutSteps([environment])
    try:
        for number, reply in enumerate(replies):
            if rollout.terminated:
                return rollout.result(unused_replies=replies[number:])
            rollout.add_reply(reply)
            rollout.add_outcome(await steps.step(rollout.messages_so_far(), rollout.extra_env_info))
    finally:
        await steps.close()
    return rollout.result()


async def begin(rollout: "ScriptedRollout", environment: TaskEnvironment) -> StepOutcome | None:
    """Starts the rollout if the environment has a `start`, and the sample was not started before.

    Raises:
        ValueError: there is no prompt then.
    """
    outcome = None
    if has_a_start(type(environment)) and not rollout.was_started:
        outcome = await validated_start(environment, rollout.messages_so_far(), deepcopy(rollout.extra_env_info))
        rollout.add_start(outcome)
    if not rollout.messages_so_far():
        raise ValueError("The sample has no prompt: give it messages, at least one.")
    return outcome


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs the coroutine in a new event loop, in a thread if this thread runs a loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        has_loop = False
    else:
        has_loop = True
    if not has_loop:  # Outside of `except`, so that exceptions of the coroutine do not have that error as context.
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


class ScriptedRollout:
    """The state of one rollout with scripted replies. Runs no step itself."""

    def __init__(self, sample: Sample) -> None:
        """Raises ValueError if a message of the sample's prompt is not valid."""
        self.extra_env_info: dict[str, Any] = deepcopy(dict(sample.get("extra_env_info") or {}))
        self.terminated = False
        self.was_started = sample.get("messages") is None and sample.get("message_log") is not None
        """Whether the sample is the log of a rollout."""
        self._message_log = prompt_of(sample)
        self._stop_strings = tuple(sample.get("stop_strings") or ())
        self._turns: list[Turn] = []
        self._rewards: dict[str, float] = {}
        self._metrics: dict[str, float] = {}

    def messages_so_far(self) -> list[ChatMessage]:
        """A copy of the message log for the environment, which may change it."""
        return [_named(message) for message in self._message_log]

    def add_start(self, outcome: StepOutcome) -> None:
        self._message_log += outcome.observations
        self._take_state(outcome)

    def add_reply(self, reply: Reply) -> None:
        message: ChatMessage = {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
        content = cut_at_stop_string(message["content"], self._stop_strings)
        self._message_log.append({**message, "role": "assistant", "content": content})

    def add_outcome(self, outcome: StepOutcome) -> None:
        self._turns.append(Turn(self._message_log[-1]["content"], self._stop_strings, outcome))
        self._message_log += outcome.observations
        rewards = outcome.reward if isinstance(outcome.reward, dict) else {UNNAMED_REWARD: outcome.reward}
        for sums, added in ((self._rewards, rewards), (self._metrics, outcome.metrics or {})):
            for name, value in added.items():
                sums[name] = sums.get(name, 0.0) + value
        self._take_state(outcome)
        self.terminated = outcome.terminated

    def _take_state(self, outcome: StepOutcome) -> None:
        if outcome.metadata is not None:
            self.extra_env_info = outcome.metadata
        if outcome.next_stop_strings is not None:
            self._stop_strings = tuple(outcome.next_stop_strings)

    def result(self, unused_replies: Sequence[Reply] = ()) -> PlayResult:
        return PlayResult(
            message_log=[message.copy() for message in self._message_log],
            turns=self._turns.copy(),
            rewards=self._rewards.copy(),
            total_reward=sum(self._rewards.values()),
            metrics=self._metrics.copy(),
            terminated=self.terminated,
            extra_env_info=deepcopy(self.extra_env_info),
            stop_strings=self._stop_strings,
            unused_replies=list(unused_replies),
        )


def prompt_of(sample: Sample) -> list[ChatMessage]:
    """The sample's prompt, as an environment sees it; empty if there is none.

    Raises:
        ValueError: one of its messages is not valid.
    """
    name = "messages" if sample.get("messages") is not None else "message_log"
    messages = sample.get(name) or []
    try:
        return MESSAGES.validate_python([_with_text(message) for message in messages])
    except ValidationError as error:
        raise ValueError(f"The sample's prompt is not valid: {problems_of(error, name)}.") from error


def _with_text(message: Any) -> Any:
    """The message with a text in place of null or of parts, and with its images beside that."""
    match message:
        case {"content": None}:
            return {**message, "content": ""}
        case {"content": [*parts]} if all(
            isinstance(part, Mapping) and part.keys() & {"text", "image"} for part in parts
        ):
            images = [part["image"] for part in parts if part.get("image") is not None]
            shown = {"images": images} if images else {}
            return {**message, "content": "".join(part.get("text") or "" for part in parts), **shown}
        case {"mm_ranges": [*ranges]}:
            return {**message, "images": [shows["media"] for shows in ranges]}
        case _:
            return message


def _named(message: ChatMessage) -> ChatMessage:
    """A copy with the images by their names, as the service gives it to environments."""
    if not (images := message.get("images")):
        return message.copy()
    return {**message, "images": [*map(_name_of, images)]}


def _name_of(image: bytes | str) -> str:
    if isinstance(image, str):
        if not image.startswith("data:"):
            return image
        image = b64decode(image.partition(",")[2])
    return f"sha256:{sha256(image).hexdigest()}"


def cut_at_stop_string(reply: str, stop_strings: Sequence[str]) -> str:
    """The reply up to the end of the stop string that is complete first, where a generation would have ended."""
    ends = [place + len(stop) for stop in stop_strings if (place := reply.find(stop)) >= 0]
    return reply[: min(ends)] if ends else reply
