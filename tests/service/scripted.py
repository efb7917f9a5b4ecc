"""Scripted implementations of `Generator`, `Environment` and `ChatTokenizer`, to test the loop's logic alone."""

import asyncio
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from deployments.failures import RolloutFailure
from deployments.protocols.chat import ChatOptions, ChatTokenizer, TokenizedObservation, prompt_message
from deployments.protocols.environments import RefusedField, StepRequest, TaskDescription
from deployments.protocols.generation import (
    NO_COLUMNS,
    Environment,
    Generation,
    GenerationRequest,
    Generator,
    IncludedColumns,
    SamplingOptions,
)
from deployments.protocols.images import ImageTokens
from deployments.protocols.replicas import GeneratorDescription
from rollout_client.contract.messages import Message, PromptMessage
from rollout_client.contract.rollouts import ObservationFormat
from rollout_env import ChatMessage, StepOutcome
from service.rollouts.episode import Episode
from service.rollouts.episode_records import EpisodeIdentity, EpisodeLimits, EpisodeStart, Prompt
from service.rollouts.staleness import VersionBounds

DESCRIPTION = GeneratorDescription("scripted", max_model_len=1000, vocab_size=0x110000)


def ids_of(text: str) -> list[int]:
    return [ord(character) for character in text]


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(chr(token_id) for token_id in token_ids)


class CharacterChatTokenizer(ChatTokenizer):
    """One token per character. The chat format puts an observation between angle brackets."""

    def prompt(self, messages: Sequence[PromptMessage], options: ChatOptions, max_tokens: int) -> list[Message]:
        """Drops the thoughts, `(...)`, of answers before the last message of a user."""
        last = max((place for place, message in enumerate(messages) if message.role == "user"), default=0)
        prompt = []
        for place, message in enumerate(messages):
            framed = str(message.content) if message.role == "assistant" or not place else f"<{message.content}>"
            said = re.sub("[(].*?[)]", "", framed) if message.role == "assistant" and place < last else framed
            prompt.append(prompt_message(message, ids_of(said)))
        return prompt

    def extends(self, rendered: Sequence[int], log: Sequence[int]) -> bool:
        return [*rendered[: len(log)]] == [*log]

    def decode(self, token_ids: Sequence[int]) -> str:
        return text_of(token_ids)

    def pieces(self, token_ids: Sequence[int], before: Sequence[int]) -> list[str | None]:
        return [chr(token_id) for token_id in token_ids]

    def observations(
        self,
        messages: Sequence[ChatMessage],
        after: Sequence[int],
        options: ChatOptions,
        room: int,
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> list[TokenizedObservation]:
        observed: list[TokenizedObservation] = []
        kept = max(room, 0)
        for message in messages:
            content = message["content"]
            framed = content if options.observation_format == "raw" else f"<{content}>"
            covered = content if len(framed) <= kept else framed[:kept].removeprefix("<")
            observed.append(TokenizedObservation(ids_of(framed)[:kept], covered, len(framed) > kept))
            if len(framed) > kept:
                break
            kept -= len(framed)
        return observed


class AskedFor(NamedTuple):
    """One call of `ChatTokenizer.observations`."""

    after: list[int]
    options: ChatOptions
    room: int
    calls: Sequence[Mapping[str, Any]]
    thread: int


class RecordingChatTokenizer(CharacterChatTokenizer):
    """Records the calls of `observations`."""

    def __init__(self) -> None:
        self.asked: list[AskedFor] = []

    def observations(self, *arguments: Any, **_: Any) -> list[TokenizedObservation]:
        _messages, after, options, room, calls = arguments
        self.asked.append(AskedFor(list(after), options, room, calls, threading.get_ident()))
        return super().observations(*arguments)


@dataclass
class ScriptedGenerator(Generator):
    """Answers each generation with the next text of its script, cut at `max_new_tokens`, or raises its exception.

    One that is interrupted gives at once the part of its tokens for which time has passed.
    """

    script: Sequence[str | Exception]
    requests: list[GenerationRequest] = field(default_factory=list)
    delay_s: float = 0.0
    delay_of: Callable[[GenerationRequest], float] | None = None
    """In place of `delay_s`."""
    cancelled: int = 0
    released: list[str] = field(default_factory=list)
    interrupted: list[str] = field(default_factory=list)
    ignores_interrupts: bool = False
    interrupts: dict[str, asyncio.Event] = field(default_factory=dict)
    """Of the rollouts that generate."""

    async def generate(self, request: GenerationRequest) -> Generation:
        answer = self.script[len(self.requests) % len(self.script)]
        self.requests.append(request)
        passed = await self.share_of_time(request, self.delay_of(request) if self.delay_of else self.delay_s)
        if isinstance(answer, Exception):
            raise answer
        token_ids = ids_of(answer)[: request.max_new_tokens]
        generation = Generation(
            token_ids=token_ids,
            logprobs=[-1.0] * len(token_ids),
            finish_reason="length" if len(answer) >= request.max_new_tokens else "stop",
        )
        return generation if passed == 1 else first_part(generation, int(passed * len(token_ids)))

    async def share_of_time(self, request: GenerationRequest, seconds: float) -> float:
        """Lets the time of a generation pass; returns the share of it that had passed when it was interrupted."""
        if not seconds:
            await asyncio.sleep(0)
            return 1.0
        began = asyncio.get_running_loop().time()
        interrupted = self.interrupts[request.rollout_id] = asyncio.Event()
        try:
            await asyncio.wait_for(interrupted.wait(), seconds)
        except TimeoutError:
            return 1.0
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            del self.interrupts[request.rollout_id]
        return (asyncio.get_running_loop().time() - began) / seconds

    def is_generating(self, rollout_id: str) -> bool:
        return rollout_id in self.interrupts

    def interrupt(self, rollout_id: str) -> bool:
        if rollout_id not in self.interrupts:
            return False
        self.interrupted.append(rollout_id)
        if not self.ignores_interrupts:
            self.interrupts[rollout_id].set()
        return True

    def release(self, rollout_id: str) -> None:
        self.released.append(rollout_id)

    async def describe(self) -> GeneratorDescription:
        return DESCRIPTION


@dataclass
class ScriptedEnvironment(Environment):
    """Answers each step with the next outcome of its script, or raises its exception."""

    script: Sequence[StepOutcome | Exception]
    requests: list[StepRequest] = field(default_factory=list)
    sample_count: int | None = None

    async def step(self, request: StepRequest) -> StepOutcome:
        answer = self.script[len(self.requests) % len(self.script)]
        self.requests.append(request)
        await asyncio.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def describe(self) -> TaskDescription:
        example, *_ = await self.example_samples(1, seed=0)
        return TaskDescription("task", "A scripted task.", {}, example, sample_count=self.sample_count)

    async def refused_fields(self, extra_env_infos: Sequence[dict[str, Any]]) -> list[RefusedField]:
        return []

    async def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [{"task_name": "task", "messages": [{"role": "user", "content": f"{seed}-{n}"}]} for n in range(count)]


def first_part(generation: Generation, tokens: int, failure: RolloutFailure | None = None) -> Generation:
    """The generation, interrupted after so many tokens."""
    return Generation(
        generation.token_ids[:tokens],
        generation.logprobs[:tokens],
        "abort",
        tuple(replace(span, end=min(span.end, tokens)) for span in generation.weight_versions if span.start < tokens),
        failure,
    )


def outcome(content: str = "", reward: float | dict[str, float] = 0.0, terminated: bool = False) -> StepOutcome:
    return StepOutcome({"role": "user", "content": content}, reward, terminated)


def without_names(samples: Any) -> Any:
    """Results as JSON without the fields that differ each time: the service's names, and the generations."""
    return [{name: value for name, value in one.items() if name not in ("rollout_id", "replay")} for one in samples]


def user_message(text: str) -> Message:
    return Message(role="user", content=text, token_ids=ids_of(text))


@dataclass
class EpisodeRecipe:
    """Makes an episode that is as plain as possible in all that a test does not say."""

    prompt: str = "Q"
    max_seq_len: int = 1000
    max_new_tokens: int | None = None
    max_rollout_turns: int = 10
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    sampling: SamplingOptions | None = None
    """In place of one with `seed`."""
    observation_format: ObservationFormat = "raw"
    position: int = 0
    group: int = 0
    retries: int = 0
    bounds: VersionBounds = field(default_factory=VersionBounds)
    include: IncludedColumns = NO_COLUMNS
    renders: bool = False
    images: dict[str, ImageTokens] = field(default_factory=dict)
    extra_env_info: dict[str, Any] = field(default_factory=lambda: {"state": 0})
    message_log: Callable[[str], list[Message]] = field(default=lambda prompt: [user_message(prompt)])
    tokenizer: ChatTokenizer = field(default_factory=CharacterChatTokenizer)

    def make(self) -> Episode:
        return Episode(self.identity(), self.start(), self.limits(), self.tokenizer)

    def identity(self) -> EpisodeIdentity:
        return EpisodeIdentity(
            "request", self.position, self.group, generation_index=0, idx=self.position, task_name="task"
        )

    def start(self) -> EpisodeStart:
        return EpisodeStart(
            Prompt.of(self.message_log(self.prompt)),
            extra_env_info=self.extra_env_info,
            stop_strings=self.stop_strings,
            sampling=self.sampling or SamplingOptions(seed=self.seed),
            chat=ChatOptions(self.observation_format, images=dict(self.images)),
            bounds=self.bounds,
            include=self.include,
            renders=self.renders,
        )

    def limits(self) -> EpisodeLimits:
        return EpisodeLimits(self.max_seq_len, self.max_new_tokens, self.max_rollout_turns, self.retries)
