"""What the core and the runner of agents exchange: one run of the program that plays a rollout. No I/O.

`AgentEpisode` (`service/rollouts/agent_episode.py`) asks for a run and takes what came of it; `RequestAgents`
(`service/agents/runs.py`) implements the port.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from deployments.failures import RolloutFailure
from rollout_client.contract import SampleInput
from rollout_client.session_contract import SessionRequest, SessionSample

SessionLimit = Literal["max_calls", "max_tokens"]


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What the episodes of a group need to know of their agent."""

    session: SessionRequest
    """With which the session of a rollout is opened; its `sample` is what the agent gets."""
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
class AgentRun:
    """What came of one run."""

    branches: Sequence[SessionSample] = ()
    """Its conversations, in the order in which their last messages were generated."""
    calls: int = 0
    """Of the engine."""
    reward: Mapping[str, float] = field(default_factory=dict)
    """What the agent gave, by names; empty if it gave none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    limit: SessionLimit | None = None
    """The limit that the session has reached."""
    failure: RolloutFailure | None = None
    """Why it did not end by itself and well."""


class Agents(Protocol):
    """Runs the agents of one request."""

    async def run(self, request: AgentRunRequest) -> AgentRun:
        """Runs the agent of a rollout, in a session of its own, and returns when it has ended.

        Cancelling the call ends the run and deletes the session. A failure of the run is in what it returns, beside
        what was generated until then.
        """
        ...

    def interrupt(self, rollout_id: str) -> bool:
        """Asks that the run of this rollout returns soon, with what was generated.

        Returns whether the rollout has a run under way; without one nothing happens.
        """
        ...
