"""A rollout whose turns a program plays, as a state machine: a run of the agent, then the judgement of it.

    next_run -> (run) -> add_run -> step_request -> (step) -> add_outcome

Guarantees, beside those of `Episode`: the message log is that of one branch of the run's session, as the engine had it;
a run that is repeated takes the place of the one before; a rollout whose run failed has no reward, unless its session
had reached a limit: then that limit is how it ended, and it is judged like any other.

The loop runs agents through the port `Agents`, which `RequestAgents` (`service/agents/sessions.py`) implements.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, Protocol

from deployments.failures import AgentFailed, RolloutFailure
from deployments.protocols.chat import ChatTokenizer
from deployments.protocols.generation import WeightSpan
from rollout_client.contract.messages import Branch
from rollout_client.contract.rollouts import SampleInput, SampleStatus
from rollout_client.contract.sessions import SessionRequest, SessionSample
from rollout_client.results import branches_beside, main_branch
from rollout_env import StepOutcome
from service.rollouts.episode import Episode
from service.rollouts.episode_records import EpisodeIdentity, EpisodeLimits, EpisodeStart
from service.rollouts.message_log import Observed

SessionLimit = Literal["max_calls", "max_tokens"]


@dataclass(frozen=True, slots=True)
class AgentTask:
    """The agent's task, shared by the episodes of a group."""

    session: SessionRequest
    """The request that opens the session of a rollout; the agent gets its `sample`."""
    scored_by: Literal["environment", "agent"] = "environment"


@dataclass(frozen=True, slots=True)
class AgentRunRequest:
    """One run."""

    task_name: str
    session: SessionRequest
    rollout_id: str
    run_id: str
    """Unique among all runs, of this rollout too."""
    request_id: str
    """The request of the rollout. This field and the next one are for logs."""
    idx: int
    share_id: str
    """The party as which the calls of the session share the engines."""

    @property
    def sample(self) -> SampleInput:
        assert self.session.sample is not None
        return self.session.sample


@dataclass(frozen=True, slots=True)
class AgentRunOutcome:
    """The outcome of one run."""

    branches: Sequence[SessionSample] = ()
    """Its conversations, in the order in which their last messages were generated."""
    calls: int = 0
    """The number of its calls of the engine."""
    reward: Mapping[str, float] = field(default_factory=dict)
    """Rewards that the agent gave, by names."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    limit: SessionLimit | None = None
    """The limit that the session has reached."""
    failure: RolloutFailure | None = None
    """The reason why it did not end by itself and well."""


class Agents(Protocol):
    """Runs the agents of one request."""

    async def run(self, request: AgentRunRequest) -> AgentRunOutcome:
        """Runs the agent of a rollout, in a session of its own, and returns when it has ended.

        Cancelling the call ends the run and deletes the session. A failure of the run is returned, beside the messages
        until then.
        """
        ...

    def interrupt(self, rollout_id: str) -> bool:
        """Asks the run of this rollout to return soon, with its messages so far.

        Returns whether the rollout has a run under way; without one nothing happens.
        """
        ...


ENDED_BY: dict[SessionLimit, SampleStatus] = {"max_calls": "max_turns", "max_tokens": "truncated"}


class AgentEpisode(Episode):
    """All the state of one rollout that an agent plays. Its prompt is empty: the agent writes it."""

    def __init__(
        self,
        identity: EpisodeIdentity,
        start: EpisodeStart,
        limits: EpisodeLimits,
        tokenizer: ChatTokenizer,
        task: AgentTask,
    ) -> None:
        self._task = task
        self._runs = count()
        super().__init__(identity, start, limits, tokenizer)

    def _begin(self) -> None:
        self._beside: list[Branch] = []
        self._ended_by: SampleStatus | None = None
        """The limit that ended the run; `None` if it ended by itself."""
        self._is_judged_next = False
        super()._begin()
        # What its program knows at a turn is not known.
        self.states = []

    @property
    def step_is_due(self) -> bool:
        """Whether the environment has to judge the run."""
        return self._is_judged_next

    def next_run(self) -> AgentRunRequest:
        """The run that comes next: the first one, or the repetition of one that failed."""
        identity = self.identity
        return AgentRunRequest(
            task_name=identity.task_name,
            session=self._task.session.model_copy(update={"generation_index": identity.generation_index}),
            rollout_id=identity.rollout_id,
            run_id=f"{identity.rollout_id}-run-{next(self._runs)}",
            request_id=identity.request_id,
            idx=identity.idx,
            share_id=self.start.share.id,
        )

    def add_run(self, run: AgentRunOutcome) -> None:
        """Takes the messages of the run, and decides how it goes on. Ignored after the end.

        Raises:
            RolloutFailure: the failure of the run, or what is missing of it. Its messages are kept.
        """
        if self.done:
            return
        self._take_log(run)
        if (cut_off := self._cut_off_by) is not None:
            self.status = cut_off
            return
        self._ended_by = None if run.failure is None or run.limit is None else ENDED_BY[run.limit]
        if run.failure is not None and self._ended_by is None:
            raise run.failure
        if not self.log.added:
            raise AgentFailed("The agent ended without a call of the model that generated something.")
        if self._task.scored_by == "environment":
            self._is_judged_next = True
            return
        if not (run.reward or self._rewards):
            raise AgentFailed("The agent ended without a reward, and it is what scores its task.")
        for name, value in run.reward.items():
            self._rewards[name] = value
        self._end()

    def tokenized_observations(self, outcome: StepOutcome) -> Observed:  # noqa: ARG002
        """Returns none: nobody would read an observation after the end of the agent."""
        return []

    def add_outcome(self, outcome: StepOutcome, observed: Observed | None = None) -> None:  # noqa: ARG002
        """Adds the judgement of the environment, and ends the episode. Ignored after the end."""
        if self.done:
            return
        self._take_outcome(outcome)
        self._end()

    def _branches_beside(self) -> list[Branch]:
        return self._beside

    def _end(self) -> None:
        self._terminated = self._ended_by is None
        self._truncated = self._ended_by == "truncated"
        self._is_judged_next = False
        self.status = "stale" if self.versions.is_stale else self.interrupted_by or self._ended_by or "completed"

    def _take_log(self, run: AgentRunOutcome) -> None:
        """Makes the main branch the log, in place of everything from the run before."""
        self._begin()
        self.metrics.add_environment_metrics(
            {**run.metrics, "agent_calls": run.calls, "agent_branches": len(run.branches)}
        )
        if not run.branches:
            return
        main = main_branch(run.branches)
        self._beside = branches_beside(main, [branch for branch in run.branches if branch is not main])
        self._rewards = dict(main.rewards)
        length, has_generated = 0, False
        for message in main.message_log:
            if message.generation_logprobs is not None:
                self.metrics.add_generation(length, len(message.token_ids), message.finish_reason)
                spans = message.weight_versions or ()
                self.versions.add(WeightSpan(span.version, span.start, span.end) for span in spans)
                has_generated = True
            elif has_generated:
                self.metrics.env_tokens += len(message.token_ids)
            length += len(message.token_ids)
        self.log.replace(main.message_log)
