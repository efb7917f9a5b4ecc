"""One rollout of one sample as a state machine: the episode decides what comes next, the loop does the I/O.

    next_generation -> (generate) -> add_generation -> step_request -> (step) -> add_outcome -> next_generation ...

Guarantees: token ids are only appended, unless the rollout is played anew from its prompt or leaves its log for another
rendering, and then the log is kept as a branch; the input of a generation is the concatenation of all token ids of the
log; an episode ends in exactly one status, and nothing changes it afterwards;
`add_generation` and `add_outcome` change nothing if they raise.
"""

from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, get_args

from deployments.protocols.chat import CONTEXT_TOKENS, ChatTokenizer, ParsedResponse, ResponseToParse, judged_log
from deployments.protocols.environments import StepRequest
from deployments.protocols.generation import Generation, GenerationRequest
from rollout_client.contract.messages import Branch
from rollout_client.contract.rollouts import SampleError, SampleResult, SampleStatus
from rollout_client.results import left_branches
from rollout_env import StepOutcome
from service.rollouts.episode_records import (
    EpisodeIdentity,
    EpisodeLimits,
    EpisodeStart,
    EpisodeState,
    PlayedGeneration,
    PlayedStep,
    TurnState,
    replay_fields,
    sampling_of_turn,
)
from service.rollouts.message_log import MessageLog, Observed
from service.rollouts.messages import was_parsed, with_parsed, without_open_stop_string
from service.rollouts.metrics import UNNAMED_REWARD, MetricCounts
from service.rollouts.retries import RetryBudget
from service.rollouts.staleness import RolloutVersions

CutOff = Literal["deadline", "cancelled", "stale"]
"""The statuses of an episode that was ended from outside, in any state."""
CUT_OFF_STATUSES = get_args(CutOff)


class Episode:
    """All the state of one rollout."""

    interruption_s = 5.0
    """Seconds that an episode that is cut off waits for its tokens: for a step of its engine, or a change of weights.
    An agent ends within one, and reading its record takes a few calls of the session store."""

    def __init__(
        self, identity: EpisodeIdentity, start: EpisodeStart, limits: EpisodeLimits, tokenizer: ChatTokenizer
    ) -> None:
        self.identity = identity
        self.start = start
        self.status: SampleStatus | None = None
        self.error: SampleError | None = None
        self._limits = limits
        self._tokenizer = tokenizer
        self.retries = RetryBudget(identity.log_fields(), limits.retries)
        self.restarts = 0
        """How often it was played anew from its prompt."""
        self.began_at: float | None = None
        """When this process began to play it, in seconds since 1970; `None` before that."""
        self.has_ended_before = False
        """Whether another process has played it to its end."""
        self.interrupted_by: CutOff | None = None
        """The status in which the episode ends with the generation that is under way."""
        self._begin()

    def _begin(self) -> None:
        """Sets the state in which the posted message log leaves the episode."""
        start = self.start
        self.log = MessageLog(start.prompt, self._limits)
        self._extra_env_info = start.extra_env_info
        self._stop_strings = start.stop_strings
        self._rewards: dict[str, float] = {}
        self._answer: str | None = None
        self.metrics = MetricCounts()
        self.generations: list[PlayedGeneration] = []
        self.steps: list[PlayedStep] = []
        """Those of an earlier process are not known."""
        self._terminated = False
        self._truncated = False
        self.versions = RolloutVersions(start.bounds, start.prompt.oldest_version)
        self._steps = start.prompt.turns
        self._first_turn = self._steps
        self.states = [TurnState(self._steps, self._extra_env_info, self._stop_strings)]
        """By turn, of those that changed it. Only the first, unless `keeps_states`."""

    @property
    def done(self) -> bool:
        return self.status is not None

    @property
    def step_is_due(self) -> bool:
        """Whether the message log ends with a complete response that the environment has not judged yet."""
        return self.log.unstepped is not None

    @property
    def was_cut_off(self) -> bool:
        return self.status in CUT_OFF_STATUSES

    @property
    def retries_used(self) -> int:
        return min(self._limits.retries - self.retries.left, self._limits.retries)

    @property
    def session_id(self) -> str:
        """The id of the environment's session, another one after each restart."""
        return f"{self.identity.rollout_id}-{self.restarts}"

    def take_restart(self) -> bool:
        """Takes a retry, and sets the rollout back to its prompt: what was generated and rewarded is dropped.

        Returns whether that was possible. A log that was posted with steps in it cannot restart, for they were made
        elsewhere, unless the environment can open a session that stands at its end.
        """
        if (self.start.prompt.turns and not self.start.forks_sessions) or not self.retries.take():
            return False
        self.restarts += 1
        self._begin()
        return True

    def next_generation(self) -> GenerationRequest | None:
        """The generation that comes next: a new response, or the rest of a partial one.

        `None` if there is no room or no turn left, or the episode was interrupted or is stale: then it has ended.

        Raises:
            VersionReplaced: the version that must generate every token is not current any more.
            PolicyDropped: the named policy that must generate has no version any more.
        """
        log, limits, start, rollout_id = self.log, self._limits, self.start, self.identity.rollout_id
        if (cut_off := self._cut_off_by) is not None:
            self.status = cut_off
        elif log.room <= 0:
            self._truncated = True
            self.status = "truncated"
        elif self._steps >= limits.max_rollout_turns:
            self.status = "max_turns"
        if self.done:
            return None
        self.versions.begin_generation()
        there = 0 if log.partial is None else len(log.partial.token_ids)
        turn = self._steps
        return GenerationRequest(
            generation_id=f"{rollout_id}-{turn}-{there}" if there else f"{rollout_id}-{turn}",
            prompt_token_ids=log.token_ids,
            max_new_tokens=min(log.room, (limits.max_new_tokens or log.room + there) - there),
            stop_strings=self._stop_strings,
            sampling=sampling_of_turn(start.sampling, turn, there),
            min_weight_version=start.min_weight_version,
            weight_version=start.bounds.version,
            rollout_id=rollout_id,
            group=self.identity.group_id,
            request_id=self.identity.request_id,
            turn=turn,
            share=start.share,
            policy=start.bounds.policy,
            include=start.include,
            images=log.images,
            experts_from=log.experts.rows if start.include.routed_experts else 0,
        )

    def add_generation(self, generation: Generation) -> None:
        """Appends the response, or adds to the partial one. Ends an episode that was interrupted or is stale.

        Ignored after the end. Tokens that another version than the demanded one has generated are dropped.

        Raises:
            GenerationLost: a version is demanded, and the engine does not say which one has generated the tokens.
        """
        if self.done:
            return
        generation = self.versions.demanded_part(generation)
        if generation.finish_reason == "abort":
            before = self.log.last_token_ids(CONTEXT_TOKENS)
            generation = without_open_stop_string(generation, before, self._stop_strings, self._tokenizer)
            if not generation.token_ids:
                self.status = self._cut_off_by
                return
        goes_on, length, tokens = self.log.partial is not None, self.log.length, len(generation.token_ids)
        start = 0 if self.log.partial is None else len(self.log.partial.token_ids)
        self.log.add_response(generation, self._tokenizer)
        self.generations.append(PlayedGeneration.of(generation, len(self.log.added) - 1, start, self._stop_strings))
        finish_reason = self.log.added[-1].finish_reason
        self.metrics.add_generation(length, tokens, finish_reason, goes_on, generation.replica)
        self.versions.add(generation.weight_versions)
        self.status = self._cut_off_by

    def response_to_parse(self) -> ResponseToParse | None:
        """The response whose step is due; `None` if there is none, or it was parsed before it was posted."""
        response = self.log.unstepped
        if self.done or response is None or was_parsed(response):
            return None
        return ResponseToParse(
            token_ids=response.token_ids,
            prompt_token_ids=self.log.token_ids[: self.log.length - len(response.token_ids)],
            tools=self.start.chat.tools,
            chat_template_kwargs=self.start.chat.chat_template_kwargs,
            turn=self._steps,
        )

    def add_parsed(self, parsed: ParsedResponse) -> None:
        """Adds the parsed parts of the response whose step is due. Ignored after the end."""
        if self.done:
            return
        self.log.added[-1] = with_parsed(self.log.added[-1], parsed)
        if parsed.parse_error is not None:
            self.metrics.parse_errors += 1

    def step_request(self, in_lockstep: bool = False) -> StepRequest:
        """The step of the environment that comes next. In lockstep it belongs with the other steps of its request."""
        identity = self.identity
        return StepRequest(
            message_log=judged_log(self.log),
            extra_env_info=self._extra_env_info,
            request_id=identity.request_id,
            rollout_id=identity.rollout_id,
            sample=identity.idx,
            step_id=f"{identity.rollout_id}-{self._steps}",
            lockstep_id=(identity.unique_request_id or identity.request_id) if in_lockstep else "",
            session_id=self.session_id,
            turn=self._steps,
            first_turn=self._first_turn,
            owner=self.start.share.key,
        )

    def tokenized_observations(self, outcome: StepOutcome) -> Observed:
        """The outcome's observation as `add_outcome` adds it. Changes nothing: a thread may do it."""
        if not (seen := outcome.observations):
            return []
        goes_on = not outcome.terminated and self._steps + 1 < self._limits.max_rollout_turns and self.log.room > 0
        if self.start.renders and goes_on and (log := self.log.rendered(seen, self.start.chat, self._tokenizer)):
            return log
        response = self.log.added[-1]
        return self._tokenizer.observations(
            seen, response.token_ids, self.start.chat, self.log.room, response.tool_calls or ()
        )

    def add_outcome(self, outcome: StepOutcome, observed: Observed | None = None) -> None:
        """Adds the reward, appends the observation, and decides whether the episode ends. Ignored after the end.

        Args:
            observed: the outcome's `tokenized_observations`, called here if `None`.
        """
        if self.done:
            return
        observed = self.tokenized_observations(outcome) if observed is None else observed
        self._take_outcome(outcome)
        if isinstance(observed, tuple):
            self.log.left.append(Branch.model_construct(message_log=[*self.log], replay=self._replay_fields()))
            moved = (replace(made, message=made.message + self.log.first_added) for made in self.generations)
            self.generations = [made for made in moved if observed[made.message].generation_logprobs is not None]
        self.metrics.env_tokens += self.log.add_observed(outcome.observations, observed)
        self._steps += 1
        if outcome.next_stop_strings is not None:
            self._stop_strings = tuple(outcome.next_stop_strings)
        if self.start.keeps_states and (outcome.metadata is not None or outcome.next_stop_strings is not None):
            self.states.append(TurnState(self._steps, self._extra_env_info, self._stop_strings))
        self._terminated = outcome.terminated
        self._truncated = bool(observed and getattr(observed[-1], "was_cut", False)) or self.log.room <= 0
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
            "message_log": self.log.experts.of_messages(self.log)
            if self.start.include.routed_experts
            else list(self.log),
            "total_reward": total_reward,
            "rewards": self._rewards.copy(),
            "status": self.status,
            "terminated": self._terminated,
            "truncated": self._truncated,
            "max_turns_reached": self.status == "max_turns",
            "extra_env_info": self._extra_env_info,
            "stop_strings": list(self._stop_strings),
            "observation_format": self.start.chat.observation_format,
            "metrics": self.metrics.metrics(self.status, self._terminated, self._truncated, total_reward),
            "rollout_id": identity.rollout_id,
        }
        optional = {
            "id": identity.id,
            "answer": self._answer,
            "error": self.error,
            "tools": self.start.chat.tools,
            "chat_template_kwargs": self.start.chat.chat_template_kwargs,
            "branches": self._branches_beside() or None,
            "replay": self._replay_fields(),
            "parent": identity.parent,
            "forked_at": None if identity.parent is None else self.start.prompt.end,
        }
        reported.update({name: value for name, value in optional.items() if value is not None})
        result = SampleResult.model_construct(**reported)
        # Set here: a caller's field could have the name of a parameter of `model_construct`.
        further_fields = result.__pydantic_extra__ = dict(identity.further_fields)
        result.__pydantic_fields_set__.update(further_fields)
        return result

    def state(self, first_message: int = 0, first_left: int = 0) -> EpisodeState:
        """The state for `restore`, with the messages from `first_message` on, and the logs before from `first_left`."""
        return EpisodeState(
            messages=self.log.added[first_message:],
            left=self.log.left[first_left:],
            extra_env_info=self._extra_env_info,
            stop_strings=self._stop_strings,
            rewards=self._rewards.copy(),
            answer=self._answer,
            metrics=deepcopy(self.metrics),
            terminated=self._terminated,
            truncated=self._truncated,
            steps=self._steps,
            restarts=self.restarts,
            retries_left=self.retries.left,
            status=self.status,
            error=self.error,
            experts=self.log.experts if self.done and self.start.include.routed_experts else None,
            staleness=self.versions.at_end,
            generations=tuple(made for made in self.generations if made.message >= first_message),
        )

    def restore(self, state: EpisodeState) -> None:
        """Brings an episode that stands at its prompt to a state with all of its messages."""
        self.log.replace(state.messages, is_whole=len(state.left) > len(self.log.left))
        self.log.left = [*state.left]
        if state.experts is not None:
            self.log.experts = state.experts
        self._extra_env_info = state.extra_env_info
        self._stop_strings = state.stop_strings
        self._rewards = dict(state.rewards)
        self._answer = state.answer
        self.generations = list(state.generations)
        if self.start.keeps_states:
            self.states += [*state.before, state.turn_state]
        self.metrics = deepcopy(state.metrics)
        self._terminated, self._truncated = state.terminated, state.truncated
        self._steps, self.restarts, self.retries.left = state.steps, state.restarts, state.retries_left
        self.status, self.error = state.status, state.error
        self.has_ended_before = self.done
        messages = chain(state.messages, *(branch.message_log for branch in state.left))
        generated = (message.weight_versions or () for message in messages)
        self.versions.restore(chain.from_iterable(generated), state.staleness)

    @property
    def _cut_off_by(self) -> CutOff | None:
        """The status in which the episode has to end now, unless it has ended by itself."""
        return "stale" if self.versions.is_stale else self.interrupted_by

    def _take_outcome(self, outcome: StepOutcome) -> None:
        """Takes the rewards, answer, metrics and state of a step."""
        self.log.set_reward(self._take_reward(outcome))
        self._answer = outcome.answer
        if outcome.metrics:
            self.metrics.add_environment_metrics(outcome.metrics)
        if outcome.metadata is not None:
            self._extra_env_info = outcome.metadata

    def _take_reward(self, outcome: StepOutcome) -> float:
        """Adds the rewards of a step and returns their sum."""
        named = outcome.reward if isinstance(outcome.reward, dict) else {UNNAMED_REWARD: outcome.reward}
        for name, value in named.items():
            self._rewards[name] = self._rewards.get(name, 0.0) + value
        return sum(named.values())

    def _branches_beside(self) -> list[Branch]:
        return left_branches(self.log.left, [*self.log]) if self.log.left else []

    def _replay_fields(self) -> dict[str, Any] | None:
        return replay_fields(self.start, self._limits, self.generations, self.log.first_added)

    def _status_after_step(self) -> SampleStatus | None:
        if self._terminated:
            return "completed"
        if self._truncated:
            return "truncated"
        return "max_turns" if self._steps >= self._limits.max_rollout_turns else None
