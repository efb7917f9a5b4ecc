"""One rollout of one sample as a state machine: the episode decides what comes next, the loop does the I/O.

    next_generation -> (generate) -> add_generation -> step_request -> (step) -> add_outcome -> next_generation ...

A generation that was interrupted leaves a partial response at the end of the log, one without finish reason, and the
next generation goes on with it.

Guarantees: token ids are only appended, unless the rollout is played anew from its prompt; the input of a generation is
the concatenation of all token ids so far; an episode ends in exactly one status, and nothing changes it afterwards;
`add_generation` and `add_outcome` change nothing if they raise. An episode holds only what was added to its prompt: the
prompt is held once for all episodes of a group.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, get_args

from deployments.protocols.chat import (
    CONTEXT_TOKENS,
    ChatTokenizer,
    ParsedResponse,
    ResponseToParse,
    TokenizedObservation,
    chat_message,
)
from deployments.protocols.environments import StepRequest
from deployments.protocols.generation import Generation, GenerationRequest, packed_ids
from rollout_client.contract.messages import Message
from rollout_client.contract.rollouts import SampleError, SampleResult, SampleStatus
from rollout_env import StepOutcome
from service.rollouts.episode_records import EpisodeIdentity, EpisodeLimits, EpisodeStart, sampling_of_turn
from service.rollouts.messages import (
    continued,
    observation_message,
    response_of,
    was_parsed,
    with_parsed,
    without_open_stop_string,
)
from service.rollouts.metrics import UNNAMED_REWARD, SampleMetricsAccumulator
from service.rollouts.progress import EpisodeState
from service.rollouts.retries import RetryBudget
from service.rollouts.staleness import RolloutVersions

CutOff = Literal["deadline", "cancelled", "stale"]
"""The statuses of an episode that was ended from outside, in any state."""
CUT_OFF_STATUSES = get_args(CutOff)


class Episode:
    """All the state of one rollout."""

    interruption_s = 1.0
    """How long an episode that is cut off waits for its tokens: a round trip to a busy replica."""

    def __init__(
        self, identity: EpisodeIdentity, start: EpisodeStart, limits: EpisodeLimits, tokenizer: ChatTokenizer
    ) -> None:
        self.identity = identity
        self._rollout_id, self._group_id = identity.rollout_id, identity.group_id
        self.echo = start.echo
        self.status: SampleStatus | None = None
        self.error: SampleError | None = None
        self._limits = limits
        self._tokenizer = tokenizer
        self._start = start
        self._prompt = start.prompt
        self.retries = RetryBudget(identity.log_fields(), limits.retries)
        self._restarts = 0
        self.interrupted_by: CutOff | None = None
        """The status in which the episode ends with the generation that is under way."""
        self._begin()

    def _begin(self) -> None:
        """Sets the state in which the posted message log leaves the episode."""
        start = self._start
        self._messages: list[Message] = [] if start.prompt.response is None else [start.prompt.response]
        """The messages after those of the prompt. A response at the end of the prompt is one, because it changes."""
        self._token_ids = packed_ids(())
        """Those after the prompt's."""
        self._extra_env_info = start.extra_env_info
        self._stop_strings = start.stop_strings
        self._rewards: dict[str, float] = {}
        self._answer: str | None = None
        self._metrics = SampleMetricsAccumulator()
        self._terminated = False
        self._truncated = False
        self.versions = RolloutVersions(start.bounds, start.prompt.oldest_version)
        self._end_full_partial()
        self._steps = self._turns_in_log() - (self.step_is_due or self._partial is not None)

    @property
    def done(self) -> bool:
        return self.status is not None

    @property
    def step_is_due(self) -> bool:
        """Whether the message log ends with a complete response that the environment has not judged yet."""
        if not self._messages:
            return False
        last = self._messages[-1]
        return last.finish_reason is not None and last.generation_logprobs is not None

    @property
    def _partial(self) -> Message | None:
        """The response at the end of the log, if its generation was interrupted."""
        last = self._messages[-1] if self._messages else None
        return last if last and last.finish_reason is None and last.generation_logprobs is not None else None

    @property
    def _message_log(self) -> Iterator[Message]:
        return chain(self._prompt.messages, self._messages)

    @property
    def _length(self) -> int:
        """In tokens, the prompt included."""
        return len(self._prompt.token_ids) + len(self._token_ids)

    @property
    def was_cut_off(self) -> bool:
        return self.status in CUT_OFF_STATUSES

    @property
    def session_id(self) -> str:
        """Of this playing of the rollout."""
        return f"{self._rollout_id}-{self._restarts}"

    def take_restart(self) -> bool:
        """Whether the rollout may be played anew, which counts as a retry. Then it stands at its prompt again, and what
        was generated and rewarded is dropped. A log that was posted with steps in it cannot: they were made elsewhere.
        """
        if self._prompt.turns or not self.retries.take():
            return False
        self._restarts += 1
        self._begin()
        return True

    def next_generation(self) -> GenerationRequest | None:
        """The generation that comes next: a new response, or the rest of a partial one.

        `None` if there is no room or no turn left, or the episode was interrupted or is stale: then it has ended.

        Raises:
            VersionReplaced: the version that must generate every token is not current any more.
            PolicyDropped: the named policy that must generate has no version any more.
        """
        room = self._limits.max_seq_len - self._length
        if (cut_off := self._cut_off_by) is not None:
            self.status = cut_off
        elif room <= 0:
            self._truncated = True
            self.status = "truncated"
        elif self._steps >= self._limits.max_rollout_turns:
            self.status = "max_turns"
        if self.done:
            return None
        self.versions.begin_generation()
        partial = self._partial
        there = 0 if partial is None else len(partial.token_ids)
        prompt_ids = self._prompt.token_ids
        turn = self._turns_in_log() - (partial is not None)
        return GenerationRequest(
            generation_id=f"{self._rollout_id}-{turn}-{there}" if there else f"{self._rollout_id}-{turn}",
            # The first generations of a group wait with one object. None is changed: `+` makes a new one.
            prompt_token_ids=prompt_ids + self._token_ids if self._token_ids else prompt_ids,
            max_new_tokens=min(room, (self._limits.max_new_tokens or room + there) - there),
            stop_strings=self._stop_strings,
            sampling=sampling_of_turn(self._start.sampling, turn, there),
            min_weight_version=self._start.min_weight_version,
            weight_version=self._start.bounds.version,
            rollout_id=self._rollout_id,
            group=self._group_id,
            request_id=self.identity.request_id,
            token_timeout_s=self._limits.token_timeout_s,
            turn=turn,
            share=self._start.share,
            policy=self._start.bounds.policy,
        )

    def add_generation(self, generation: Generation) -> None:
        """Appends the response, or adds to the partial one. Ends an episode that was interrupted or is stale.

        Ignored after the end. Tokens that another version than the demanded one has generated are dropped.

        Raises:
            GenerationLost: a version is demanded, and the engine does not say which one has generated the tokens.
        """
        if self.done:
            return
        partial = self._partial
        generation = self.versions.demanded_part(generation)
        if generation.finish_reason == "abort":
            before = self._prompt.token_ids[-CONTEXT_TOKENS:] + self._token_ids[-CONTEXT_TOKENS:]
            generation = without_open_stop_string(generation, before, self._stop_strings, self._tokenizer)
            if not generation.token_ids:
                self.status = self._cut_off_by
                return
        if partial is not None:
            self._messages[-1] = continued(partial, generation, self._tokenizer)
        else:
            self._messages.append(response_of(generation, self._tokenizer))
        self._metrics.add_generation(self._length, len(generation.token_ids), goes_on=partial is not None)
        self._metrics.add_tokens_of(generation.replica, len(generation.token_ids))
        self._token_ids.extend(generation.token_ids)
        self.versions.add(generation.weight_versions)
        self._end_full_partial()
        self._metrics.end_generation(self._messages[-1].finish_reason)
        self.status = self._cut_off_by

    def response_to_parse(self) -> ResponseToParse | None:
        """The response whose step is due; `None` if there is none, or it was parsed before it was posted."""
        if self.done or not self.step_is_due or was_parsed(self._messages[-1]):
            return None
        response = self._messages[-1]
        before = self._length - len(response.token_ids)
        return ResponseToParse(
            token_ids=response.token_ids,
            prompt_token_ids=(self._prompt.token_ids + self._token_ids)[:before],
            tools=self._start.chat.tools,
            chat_template_kwargs=self._start.chat.chat_template_kwargs,
            turn=self._turns_in_log() - 1,
        )

    def add_parsed(self, parsed: ParsedResponse) -> None:
        """Adds what was read out of the response whose step is due. Ignored after the end."""
        if self.done:
            return
        self._messages[-1] = with_parsed(self._messages[-1], parsed)
        if parsed.parse_error is not None:
            self._metrics.add_parse_error()

    def step_request(self, in_lockstep: bool = False) -> StepRequest:
        """The step of the environment that comes next. In lockstep it belongs with the other steps of its request."""
        identity = self.identity
        return StepRequest(
            message_log=[chat_message(message) for message in self._message_log],
            extra_env_info=self._extra_env_info,
            request_id=identity.request_id,
            rollout_id=self._rollout_id,
            sample=identity.idx,
            step_id=f"{self._rollout_id}-{self._steps}",
            lockstep_id=(identity.unique_request_id or identity.request_id) if in_lockstep else "",
            session_id=self.session_id,
            turn=self._steps,
        )

    def tokenized_observations(self, outcome: StepOutcome) -> Sequence[TokenizedObservation]:
        """The outcome's observation as `add_outcome` appends it. Changes nothing: a thread may do it."""
        if not outcome.observations:
            return []
        room = self._limits.max_seq_len - self._length
        response = self._messages[-1]
        *before, calls = (message.tool_calls or () for message in self._message_log)
        return self._tokenizer.observations(
            outcome.observations, response.token_ids, self._start.chat, room, calls, sum(map(len, before))
        )

    def add_outcome(self, outcome: StepOutcome, observed: Sequence[TokenizedObservation] | None = None) -> None:
        """Adds the reward, appends the observation, and decides whether the episode ends. Ignored after the end.

        Args:
            observed: what `tokenized_observations` has made of the outcome; made here if it is `None`.
        """
        if self.done:
            return
        response = self._messages[-1]
        if observed is None:
            observed = self.tokenized_observations(outcome)
        self._messages[-1] = response.model_copy(update={"reward": self._take_reward(outcome.reward)})
        # Messages that had no room left are not among those that were tokenized.
        for message, tokens in zip(outcome.observations, observed, strict=False):
            self._messages.append(observation_message(message, tokens))
            self._token_ids.extend(tokens.token_ids)
        self._metrics.add_observation(sum(len(tokens.token_ids) for tokens in observed))
        if outcome.metrics:
            self._metrics.add_environment_metrics(outcome.metrics)
        self._steps += 1
        self._answer = outcome.answer
        if outcome.metadata is not None:
            self._extra_env_info = outcome.metadata
        if outcome.next_stop_strings is not None:
            self._stop_strings = tuple(outcome.next_stop_strings)
        self._terminated = outcome.terminated
        was_cut = bool(observed) and observed[-1].was_cut
        self._truncated = was_cut or self._length >= self._limits.max_seq_len
        self.status = "stale" if self.versions.is_stale else self._status_after_step() or self.interrupted_by

    def interrupt(self, status: CutOff) -> None:
        """Ends the episode in `status` with the generation that is under way, whether that is whole or partial."""
        self.interrupted_by = self.interrupted_by or status

    def fail(self, error: SampleError) -> None:
        """Ends the episode with an error. Its message log keeps the turns that were played. Ignored after the end."""
        if self.done:
            return
        self.status = "error"
        self.error = error

    def cut_off(self, status: CutOff) -> None:
        """Ends the episode in its current state, from which it can be resumed. Ignored after the end."""
        self.status = self.status or status

    def result(self) -> SampleResult:
        """The episode as the response shows it. `total_reward` is null on failure: unknown, not zero."""
        identity = self.identity
        total_reward = None if self.error else sum(self._rewards.values())
        reported: dict[str, Any] = {
            "idx": identity.idx,
            "generation_index": identity.generation_index,
            "task_name": identity.task_name,
            "message_log": list(self._message_log),
            "total_reward": total_reward,
            "rewards": self._rewards.copy(),
            "status": self.status,
            "terminated": self._terminated,
            "truncated": self._truncated,
            "max_turns_reached": self.status == "max_turns",
            "extra_env_info": self._extra_env_info,
            "stop_strings": list(self._stop_strings),
            "observation_format": self._start.chat.observation_format,
            "metrics": self._metrics.metrics(self.status, self._terminated, self._truncated, total_reward),
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
        # Set here: a caller's field could have the name of a parameter of `model_construct`.
        further_fields = result.__pydantic_extra__ = dict(identity.further_fields)
        result.__pydantic_fields_set__.update(further_fields)
        return result

    @property
    def restarts(self) -> int:
        """How often it was played anew from its prompt."""
        return self._restarts

    @property
    def tokens_by_replica(self) -> Mapping[str, int]:
        """How many tokens each replica has generated, as far as known."""
        return self._metrics.tokens_by_replica

    @property
    def message_count(self) -> int:
        """Of the messages after the prompt's."""
        return len(self._messages)

    def state(self, first_message: int = 0) -> EpisodeState:
        """What `restore` needs, with the messages from `first_message` on."""
        return EpisodeState(
            messages=self._messages[first_message:],
            extra_env_info=self._extra_env_info,
            stop_strings=self._stop_strings,
            rewards=self._rewards.copy(),
            answer=self._answer,
            metrics=self._metrics.counts(),
            terminated=self._terminated,
            truncated=self._truncated,
            steps=self._steps,
            restarts=self._restarts,
            retries_left=self.retries.left,
            status=self.status,
            error=self.error,
            staleness=self.versions.at_end,
        )

    def restore(self, state: EpisodeState) -> None:
        """Brings an episode that stands at its prompt to a state with all of its messages."""
        posted = 0 if self._prompt.response is None else len(self._prompt.response.token_ids)
        self._messages = list(state.messages)
        self._token_ids = packed_ids(chain.from_iterable(message.token_ids for message in state.messages))[posted:]
        self._extra_env_info = state.extra_env_info
        self._stop_strings = state.stop_strings
        self._rewards = dict(state.rewards)
        self._answer = state.answer
        self._metrics.restore(state.metrics)
        self._terminated, self._truncated = state.terminated, state.truncated
        self._steps, self._restarts, self.retries.left = state.steps, state.restarts, state.retries_left
        self.status, self.error = state.status, state.error
        generated = (message.weight_versions or () for message in state.messages)
        self.versions.restore(chain.from_iterable(generated), state.staleness)

    @property
    def _cut_off_by(self) -> CutOff | None:
        """The status in which the episode has to end now, unless it has ended by itself."""
        return "stale" if self.versions.is_stale else self.interrupted_by

    def _turns_in_log(self) -> int:
        return self._prompt.turns + sum(message.generation_logprobs is not None for message in self._messages)

    def _take_reward(self, reward: float | dict[str, float]) -> float:
        named = reward if isinstance(reward, dict) else {UNNAMED_REWARD: reward}
        for name, value in named.items():
            self._rewards[name] = self._rewards.get(name, 0.0) + value
        return sum(named.values())

    def _end_full_partial(self) -> None:
        """A partial response that has no room left, or all the tokens that it may have, is whole: its step is due."""
        partial, limits = self._partial, self._limits
        if partial is None:
            return
        longest = limits.max_new_tokens or limits.max_seq_len
        if len(partial.token_ids) >= longest or self._length >= limits.max_seq_len:
            self._messages[-1] = partial.model_copy(update={"finish_reason": "length"})

    def _status_after_step(self) -> SampleStatus | None:
        if self._terminated:
            return "completed"
        if self._truncated:
            return "truncated"
        return "max_turns" if self._steps >= self._limits.max_rollout_turns else None
