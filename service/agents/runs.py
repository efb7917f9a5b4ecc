"""Runs the agents of rollouts: opens a session for each run, has it run at a replica, reads the session's record.

The replicas run `deployments/agents/environment.py`.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Set
from contextlib import nullcontext
from typing import Any

from deployments.agents.programs import AgentCall
from deployments.failures import Overloaded, RolloutFailure, SessionStoreLost, StoreFailure, VersionReplaced
from deployments.policy.failures import PolicyFailure
from deployments.protocols.environments import StepRequest
from deployments.protocols.generation import Environment
from deployments.sessions.failures import SessionFailure, SessionLimitReached
from rollout_client.contract.sessions import SessionInfo, SessionLimits
from rollout_env import StepOutcome
from service.access.keys import Caller
from service.admission.admission import Admission
from service.agents.sessions import AgentSessions
from service.rollouts.agent_episode import AgentRunOutcome, AgentRunRequest, Agents, SessionLimit

KEPT_EVERY_S = 60.0
"""Interval at which the session store is told that a run goes on: its agent may make no call for long."""
SETTLED_WITHIN_S = 2.0
"""Wait after the end of a run for its calls to end and be recorded."""
SETTLED_POLL_S = 0.05
logger = logging.getLogger("rollout_service.agents")


class AgentRuns:
    """The agents of one ingress replica.

    Args:
        programs: the deployments that run the agents, by task.
        address: the service's, for a replica on any node, unless `sessions.base_url` says another one.
        admission: counts the sandboxes of each key.
        sandboxed: the tasks whose runs have a sandbox each.
    """

    def __init__(
        self,
        sessions: AgentSessions,
        programs: Mapping[str, Environment],
        address: str,
        admission: Admission,
        sandboxed: Set[str] = frozenset(),
    ) -> None:
        self.sessions = sessions
        self.programs = programs
        self.address = address
        self.admission = admission
        self.sandboxed = sandboxed

    def of_request(self, caller: Caller) -> "RequestAgents":
        return RequestAgents(self, caller)


class RequestAgents(Agents):
    """Runs the agents of the rollouts of one request."""

    def __init__(self, runs: AgentRuns, caller: Caller) -> None:
        self._runs = runs
        self._caller = caller
        self._namespace = caller.name or ""
        self._sandboxes = runs.admission.sandboxes_of(caller)
        self._running: dict[str, asyncio.Task[StepOutcome]] = {}
        """By rollout. One that was interrupted is there until its record is read."""

    async def run(self, request: AgentRunRequest) -> AgentRunOutcome:
        """See `Agents.run`."""
        # A run that waits holds no session.
        async with self._sandboxes if request.task_name in self._runs.sandboxed else nullcontext():
            return await self._in_session(request)

    async def _in_session(self, request: AgentRunRequest) -> AgentRunOutcome:
        try:
            opened = await self._runs.sessions.open(
                request.session, self._caller, self._runs.address, share_id=request.share_id
            )
        except (StoreFailure, RolloutFailure) as error:
            return AgentRunOutcome(failure=failure_of_store(error))
        try:
            return await self._run(request, opened)
        finally:
            self._running.pop(request.rollout_id, None)
            self._runs.sessions.start_deleting(opened.id, self._namespace)

    def interrupt(self, rollout_id: str) -> bool:
        """See `Agents.interrupt`."""
        if (running := self._running.get(rollout_id)) is None:
            return False
        running.cancel()
        return True

    async def _run(self, request: AgentRunRequest, opened: SessionInfo) -> AgentRunOutcome:
        step = self._runs.programs[request.task_name].step(step_request(request, opened))
        running = self._running[request.rollout_id] = asyncio.create_task(step_outcome(step))
        try:
            await self._ended(running, opened.id, min(KEPT_EVERY_S, request.session.limits.idle_s / 2))
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.wait([running])
            raise
        outcome: StepOutcome | None = None
        failure: RolloutFailure | None = None
        try:
            outcome = running.result()
        except RolloutFailure as error:
            failure = error
        except asyncio.CancelledError:
            failure = None  # It was interrupted.
        try:
            return await self._with_record(request.session.limits, opened.id, outcome, failure)
        except (StoreFailure, RolloutFailure) as error:
            return AgentRunOutcome(failure=failure or failure_of_store(error))

    async def _ended(self, running: "asyncio.Task[StepOutcome]", session_id: str, kept_every_s: float) -> None:
        while True:
            ended, _ = await asyncio.wait([running], timeout=kept_every_s)
            if ended:
                return
            try:
                await self._runs.sessions.store.info(session_id, self._namespace)
            except (StoreFailure, RolloutFailure) as error:
                # The agent notices it at its next call, if it is so.
                logger.warning("The session of a run cannot be asked: %s", error)

    async def _with_record(
        self, limits: SessionLimits, session_id: str, outcome: StepOutcome | None, failure: RolloutFailure | None
    ) -> AgentRunOutcome:
        """The run with what the session has recorded of it. Raises what the session store raises."""
        store = self._runs.sessions.store
        info = await store.end(session_id, self._namespace)
        settled_at = asyncio.get_running_loop().time() + SETTLED_WITHIN_S
        while info.calls_in_flight and asyncio.get_running_loop().time() < settled_at:
            await asyncio.sleep(SETTLED_POLL_S)
            info = await store.info(session_id, self._namespace)
        recorded = await store.samples(session_id, self._namespace)
        reward = outcome.reward if outcome is not None and isinstance(outcome.reward, dict) else {}
        metrics = {} if outcome is None else outcome.metrics or {}
        return AgentRunOutcome(recorded.samples, info.calls, reward, metrics, limit_of(info, limits), failure)


async def step_outcome(step: Coroutine[Any, Any, StepOutcome]) -> StepOutcome:
    return await step


def step_request(request: AgentRunRequest, opened: SessionInfo) -> StepRequest:
    """The run as the one step that `AgentRunsOfTask` makes of it."""
    assert opened.api_key is not None
    sample = request.sample.model_dump(mode="json", exclude_unset=True) | {"idx": request.idx}
    call = AgentCall(base_url=opened.base_url, api_key=opened.api_key, sample=sample)
    return StepRequest(
        message_log=[],
        extra_env_info=call.model_dump(),
        request_id=request.request_id,
        rollout_id=request.rollout_id,
        sample=request.idx,
        step_id=request.run_id,
    )


def limit_of(info: SessionInfo, limits: SessionLimits) -> SessionLimit | None:
    """The limit that a session has reached, beyond which it refuses calls."""
    if info.calls >= limits.max_calls:
        return "max_calls"
    return "max_tokens" if info.total_tokens >= limits.max_tokens else None


def failure_of_store(error: StoreFailure | RolloutFailure) -> RolloutFailure:
    """The refusal of a store as the failure of a rollout."""
    match error:
        case RolloutFailure():
            return error
        case SessionLimitReached():
            return Overloaded(f"No session can be opened for the agent now: {error}")
        case PolicyFailure():
            return VersionReplaced(str(error))
        case SessionFailure():
            return SessionStoreLost(f"The session of the agent is gone: {error}")
    return SessionStoreLost(str(error))
