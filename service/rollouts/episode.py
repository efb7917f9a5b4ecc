"""One rollout of one sample, as a state machine: it decides, others do the I/O.

    next_generation -> (generate) -> add_generation -> step_request -> (step) -> add_outcome -> next_generation ...

Guarantees: `token_ids` are only ever appended; the input of a generation is their concatenation; an episode ends in
exactly one status; `add_generation` and `add_outcome` change nothing if they raise.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from deployments.protocols import (
    ChatMessage,
    Generation,
    GenerationRequest,
    SamplingOptions,
    StepOutcome,
    StepRequest,
    packed_ids,
)
from rollout_client.contract import (
    Message,
    ObservationFormat,
    SampleError,
    SampleMetrics,
    SampleResult,
    SampleStatus,
    WeightVersionSpan,
)

UNNAMED_REWARD = "reward"
CutOff = Literal["deadline", "cancelled"]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How messages become tokens: the format of observations, and what the chat template is given."""

    observation_format: ObservationFormat = "chat"
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TokenizedObservation:
    """An observation's ids, the text that they cover, and whether any had to be left out."""

    token_ids: list[int]
    content: str
    was_cut: bool


class ChatTokenizer(Protocol):
    """What an episode asks of the tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens skipped."""
        ...

    def observation(
        self, observation: ChatMessage, after: Sequence[int], options: ChatOptions, room: int
    ) -> TokenizedObservation:
        """Tokenizes an observation that follows the generated ids `after`, keeping at most `room` ids."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Lengths in tokens; `max_new_tokens` bounds each generation, `max_seq_len` the whole log.

    `max_rollout_turns` counts the turns that the given log brought along; `retries` bounds how often a call of the
    sample is tried again after a failure of the fleet.
    """

    max_seq_len: int
    max_new_tokens: int | None
    max_rollout_turns: int
    retries: int = 0


@dataclass(frozen=True, slots=True)
class EpisodeIdentity:
    """Which rollout of which sample this is, and what comes back untouched."""

    request_id: str
    position: int
    group: int
    generation_index: int
    idx: int
    task_name: str
    id: str | None = None
    further_fields: dict[str, Any] = field(default_factory=dict)

    @property
    def rollout_id(self) -> str:
        """Unique among all rollouts."""
        return f"{self.request_id}-{self.position}-{self.generation_index}"


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """What the first turn begins with."""

    message_log: tuple[Message, ...]
    extra_env_info: dict[str, Any]
    stop_strings: tuple[str, ...]
    sampling: SamplingOptions
    chat: ChatOptions
    min_weight_version: int = 0


class Episode:
    """The sample's own record: all the state a rollout has."""

    def __init__(
        self, identity: EpisodeIdentity, start: EpisodeStart, limits: EpisodeLimits, tokens: ChatTokenizer
    ) -> None:
        self.identity = identity
        self.status: SampleStatus | None = None
        self.error: SampleError | None = None
        self._limits = limits
        self._tokens = tokens
        self._start = start
        self._message_log = list(start.message_log)
        self._token_ids = packed_ids(token_id for message in start.message_log for token_id in message.token_ids)
        self._extra_env_info = start.extra_env_info
        self._stop_strings = start.stop_strings
        self._rewards: dict[str, float] = {}
        self._answer: str | None = None
        self._turn_gen_tokens: list[int] = []
        self._turn_input_tokens: list[int] = []
        self._env_tokens = 0
        self._steps = self._turns_in_log() - self.step_is_due
        self._retries_left = limits.retries
        self._terminated = False
        self._truncated = False
        if self.step_is_due:
            self._truncate_if_cut_by_max_seq_len()

    @property
    def done(self) -> bool:
        return self.status is not None

    @property
    def step_is_due(self) -> bool:
        """The log ends with a whole response that its environment has not judged yet."""
        if not self._message_log:
            return False
        last = self._message_log[-1]
        return last.finish_reason is not None and last.generation_logprobs is not None

    @property
    def was_cut_off(self) -> bool:
        return self.status in ("deadline", "cancelled")

    def take_retry(self) -> bool:
        """Whether one more call may be tried again; counts it if so."""
        self._retries_left -= 1
        return self._retries_left >= 0

    def next_generation(self) -> GenerationRequest | None:
        """The generation that is due, or None if there is no room or no turn left for it, which ends the sample."""
        room = self._limits.max_seq_len - len(self._token_ids)
        if room <= 0:
            self._truncate()
            return None
        if self._steps >= self._limits.max_rollout_turns:
            self.status = "max_turns"
            return None
        turn = self._turns_in_log()
        return GenerationRequest(
            request_id=f"{self.identity.rollout_id}-{turn}",
            prompt_token_ids=self._token_ids[:],
            max_new_tokens=min(room, self._limits.max_new_tokens or room),
            stop_strings=self._stop_strings,
            sampling=sampling_of_turn(self._start.sampling, turn),
            min_weight_version=self._start.min_weight_version,
            rollout_id=self.identity.rollout_id,
            group=f"{self.identity.request_id}-{self.identity.group}",
        )

    def add_generation(self, generation: Generation) -> None:
        """Appends the response; one that was cut by `max_seq_len` truncates the sample. Too late if that is over."""
        if self.done:
            return
        self._message_log.append(
            Message.model_construct(
                role="assistant",
                content=self._tokens.decode(generation.token_ids),
                token_ids=generation.token_ids,
                generation_logprobs=generation.logprobs,
                finish_reason=generation.finish_reason,
                weight_versions=[
                    WeightVersionSpan.model_construct(version=span.version, start=span.start, end=span.end)
                    for span in generation.weight_versions
                ],
            )
        )
        self._turn_input_tokens.append(len(self._token_ids))
        self._token_ids.extend(generation.token_ids)
        self._turn_gen_tokens.append(len(generation.token_ids))
        self._truncate_if_cut_by_max_seq_len()

    def step_request(self) -> StepRequest:
        return StepRequest(
            message_log=[{"role": message.role, "content": message.content} for message in self._message_log],
            extra_env_info=self._extra_env_info,
            rollout_id=self.identity.rollout_id,
        )

    def add_outcome(self, outcome: StepOutcome) -> None:
        """Takes the reward, appends the observation and decides whether another turn is due. Too late if it is over."""
        if self.done:
            return
        response = self._message_log[-1]
        room = self._limits.max_seq_len - len(self._token_ids)
        observation = self._tokens.observation(outcome.observation, response.token_ids, self._start.chat, room)
        self._message_log[-1] = response.model_copy(update={"reward": self._take_reward(outcome.reward)})
        self._message_log.append(
            Message.model_construct(
                role=outcome.observation["role"],
                content=observation.content,
                token_ids=packed_ids(observation.token_ids),
            )
        )
        self._token_ids.extend(observation.token_ids)
        self._env_tokens += len(observation.token_ids)
        self._steps += 1
        self._answer = outcome.answer
        if outcome.metadata is not None:
            self._extra_env_info = outcome.metadata
        if outcome.next_stop_strings is not None:
            self._stop_strings = tuple(outcome.next_stop_strings)
        self._terminated = outcome.terminated
        self._truncated = observation.was_cut or len(self._token_ids) >= self._limits.max_seq_len
        self.status = self._status_after_step()

    def fail(self, error: SampleError) -> None:
        """Ends the episode with what broke it, unless it is over; what was reached stays in its log."""
        if self.done:
            return
        self.status = "error"
        self.error = error

    def cut_off(self, status: CutOff) -> None:
        """Ends the episode where it is, unless it is over already."""
        self.status = self.status or status

    def result(self) -> SampleResult:
        identity = self.identity
        total_reward = None if self.error else sum(self._rewards.values())
        reported: dict[str, Any] = {
            "idx": identity.idx,
            "generation_index": identity.generation_index,
            "task_name": identity.task_name,
            "message_log": self._message_log.copy(),
            "total_reward": total_reward,
            "rewards": self._rewards.copy(),
            "status": self.status,
            "terminated": self._terminated,
            "truncated": self._truncated,
            "max_turns_reached": self.status == "max_turns",
            "extra_env_info": self._extra_env_info,
            "stop_strings": list(self._stop_strings),
            "observation_format": self._start.chat.observation_format,
            "metrics": self._metrics(total_reward),
        }
        optional = {
            "id": identity.id,
            "answer": self._answer,
            "error": self.error,
            "tools": self._start.chat.tools,
            "chat_template_kwargs": self._start.chat.chat_template_kwargs,
        }
        reported.update({name: value for name, value in optional.items() if value is not None})
        result = SampleResult.model_construct(**reported)
        # Not through model_construct, where a caller's field could have the name of a parameter.
        further_fields = result.__pydantic_extra__ = dict(identity.further_fields)
        result.__pydantic_fields_set__.update(further_fields)
        return result

    def _turns_in_log(self) -> int:
        return sum(message.generation_logprobs is not None for message in self._message_log)

    def _take_reward(self, reward: float | dict[str, float]) -> float:
        named = reward if isinstance(reward, dict) else {UNNAMED_REWARD: reward}
        for name, value in named.items():
            self._rewards[name] = self._rewards.get(name, 0.0) + value
        return sum(named.values())

    def _truncate_if_cut_by_max_seq_len(self) -> None:
        cut_short = self._message_log[-1].finish_reason == "length"
        if cut_short and len(self._token_ids) >= self._limits.max_seq_len:
            self._truncate()

    def _truncate(self) -> None:
        self._truncated = True
        self.status = "truncated"

    def _status_after_step(self) -> SampleStatus | None:
        if self._terminated:
            return "completed"
        if self._truncated:
            return "truncated"
        return "max_turns" if self._steps >= self._limits.max_rollout_turns else None

    def _metrics(self, total_reward: float | None) -> SampleMetrics:
        assistant_tokens = sum(self._turn_gen_tokens)
        return SampleMetrics.model_construct(
            turn_count=len(self._turn_gen_tokens),
            total_tokens=assistant_tokens + self._env_tokens,
            assistant_tokens=assistant_tokens,
            env_tokens=self._env_tokens,
            terminated=self._terminated,
            truncated=self._truncated,
            max_turns_reached=self.status == "max_turns",
            total_reward=total_reward,
            turn_gen_tokens=self._turn_gen_tokens.copy(),
            turn_input_tokens=self._turn_input_tokens.copy(),
        )


def sampling_of_turn(sampling: SamplingOptions, turn: int) -> SamplingOptions:
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=derived_seed(sampling.seed, turn))


def derived_seed(seed: int, *path: int) -> int:
    """A seed in [0, 2^63) for the place `path` under `seed`: equal places get equal seeds, others unrelated ones."""
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
