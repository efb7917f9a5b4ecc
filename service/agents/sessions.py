"""Sessions in the ingress: opening them, who may use which, and the runs of agents that rollouts give one each.

The replicas that run agents: `deployments/agents/environment.py`.
"""

import asyncio
import hmac
import logging
import secrets
from collections import OrderedDict
from collections.abc import Coroutine, Mapping, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from deployments.agents.programs import AgentCall
from deployments.failures import Overloaded, RolloutFailure, SessionStoreLost, StoreFailure, VersionReplaced
from deployments.policy.failures import PolicyFailure
from deployments.protocols.environments import StepRequest
from deployments.protocols.generation import Environment
from deployments.rpc.background_tasks import BackgroundTasks
from deployments.sessions.failures import SessionFailure, SessionLimitReached
from deployments.sessions.records import OpenSession
from rollout_client.contract.sessions import SessionInfo, SessionLimits, SessionRequest, SessionReward
from rollout_env import StepOutcome
from service.access.access_control import AccessControl, key_in, not_authenticated
from service.access.keys import Caller, hash_of
from service.agents.session_judge import SessionJudge
from service.remote.policy import RemotePolicy
from service.rollouts.agent_episode import AgentRunOutcome, AgentRunRequest, Agents, SessionLimit

if TYPE_CHECKING:
    from deployments.sessions.store import SessionStore

_KEY_PREFIX = "session-"
_KEY_BYTES = 32
_MOST_REMEMBERED = 10_000
_KEPT_EVERY_S = 60.0
"""Interval at which the session store is told that a run goes on: its agent may make no call for long."""
_SETTLED_WITHIN_S = 2.0
"""Wait after the end of a run for its calls to end and be recorded."""
_SETTLED_POLL_S = 0.05
Result = TypeVar("Result")
logger = logging.getLogger("rollout_service.agents")


class AgentSessions:
    """The sessions of one ingress replica.

    Args:
        base_url: the `sessions.base_url` of the config.
    """

    def __init__(
        self,
        store: "SessionStore",
        policy: RemotePolicy,
        access: AccessControl,
        judge: SessionJudge,
        base_url: str | None = None,
    ) -> None:
        self.store = store
        self._policy = policy
        self._access = access
        self._judge = judge
        self._base_url = base_url
        self._remembered: OrderedDict[str, OpenSession] = OrderedDict()
        """Those that were used last, which never change."""
        self._tasks = BackgroundTasks()

    async def open(
        self, request: SessionRequest, caller: Caller, address: str, share_id: str | None = None
    ) -> SessionInfo:
        """Opens a session. Its key is in this answer alone: the session of a caller who leaves is deleted.

        Args:
            address: the service's own, as the caller has reached it.
            share_id: of the `POST /rollout` whose rollout the session is, with which its calls were admitted.

        Raises:
            SessionLimitReached: there is no room for another one.
            PolicyNotCurrent: the weights that it demands are not current, and do not become current in time.
            PolicyUnknown: it names a policy that does not exist.
        """
        await self._policy.wait_for_version(request.policy)
        session_id, key = uuid4().hex, _KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
        base_url = f"{(self._base_url or address).rstrip('/')}/v1/sessions/{session_id}"
        opened = OpenSession(session_id, caller.name or "", hash_of(key), base_url, request, share_id)
        opening = self._start(self.store.open(opened))
        try:
            info = await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._start(self._delete_opened(opening, opened))
            raise
        return info.model_copy(update={"api_key": key})

    def start_deleting(self, session_id: str, namespace: str) -> None:
        """Deletes a session, also while its rollout is cancelled."""
        self._start(self._delete(session_id, namespace))

    def _start(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        return self._tasks.start(work, Context())

    async def _delete_opened(self, opening: "asyncio.Task[SessionInfo]", opened: OpenSession) -> None:
        """Deletes a session whose opening nobody waits for, once it is open: before, there is nothing to delete."""
        await asyncio.wait([opening])
        if opening.exception() is None:
            await self._delete(opened.id, opened.namespace)

    async def _delete(self, session_id: str, namespace: str) -> None:
        try:
            await self.store.delete(session_id, namespace)
        except (StoreFailure, RolloutFailure) as error:
            # It expires by itself.
            logger.info("A session was not deleted: %s", error)

    async def reward(self, session_id: str, namespace: str, reward: SessionReward, request_id: str) -> SessionInfo:
        """Raises what `SessionStore.reward` and `SessionJudge.rewards` raise."""
        if reward.judge:
            samples = await self.store.samples(session_id, namespace)
            rewards = await self._judge.rewards(samples.samples, request_id, reward.generation_id)
            # An environment may name more parts than a caller.
            reward = SessionReward.model_construct(rewards=rewards, generation_id=reward.generation_id)
        return await self.store.reward(session_id, namespace, reward)

    async def authorized(self, session_id: str, authorization: Sequence[str]) -> OpenSession:
        """The session, for whoever has its key.

        Raises:
            RequestProblem: 401, the request does not carry its key.
            SessionUnknown: there is none.
        """
        key = key_in(authorization)
        session = self._remembered.get(session_id) or await self.store.opened(session_id)
        if not hmac.compare_digest(session.key_sha256, hash_of(key)):
            raise not_authenticated("the key is not that of the session", 'error="invalid_token"')
        self._remember(session)
        return session

    async def caller_of(self, session: OpenSession) -> Caller:
        """Who opened the session. Raises `RequestProblem` (401, 403): they may not go on."""
        return await self._access.caller_named(session.namespace or None, "rollout")

    def _remember(self, session: OpenSession) -> None:
        self._remembered[session.id] = session
        self._remembered.move_to_end(session.id)
        if len(self._remembered) > _MOST_REMEMBERED:
            self._remembered.popitem(last=False)


class RequestAgents(Agents):
    """Runs the agents of the rollouts of one request: each in a session of its own, whose record it returns.

    Args:
        programs: the deployments that run the agents, by task.
        address: the service's, for a replica on any node, unless `sessions.base_url` names another one.
        caller: who posted the request.
    """

    def __init__(
        self,
        sessions: AgentSessions,
        programs: Mapping[str, Environment],
        address: str,
        caller: Caller,
    ) -> None:
        self._sessions = sessions
        self._programs = programs
        self._address = address
        self._caller = caller
        self._running: dict[str, asyncio.Task[StepOutcome]] = {}
        """By rollout. One that was interrupted is there until its record is read."""

    async def run(self, request: AgentRunRequest) -> AgentRunOutcome:
        """See `Agents.run`."""
        try:
            opened = await self._sessions.open(request.session, self._caller, self._address, share_id=request.share_id)
        except (StoreFailure, RolloutFailure) as error:
            return AgentRunOutcome(failure=_failure_of_store(error))
        try:
            return await self._run(request, opened)
        finally:
            self._running.pop(request.rollout_id, None)
            self._sessions.start_deleting(opened.id, self._caller.namespace)

    def interrupt(self, rollout_id: str) -> bool:
        """See `Agents.interrupt`."""
        if (running := self._running.get(rollout_id)) is None:
            return False
        running.cancel()
        return True

    async def _run(self, request: AgentRunRequest, opened: SessionInfo) -> AgentRunOutcome:
        step = self._programs[request.task_name].step(_step_request(request, opened))
        running = self._running[request.rollout_id] = asyncio.create_task(_step_outcome(step))
        try:
            await self._ended(running, opened.id, min(_KEPT_EVERY_S, request.session.limits.idle_s / 2))
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
            return AgentRunOutcome(failure=failure or _failure_of_store(error))

    async def _ended(self, running: "asyncio.Task[StepOutcome]", session_id: str, kept_every_s: float) -> None:
        while True:
            ended, _ = await asyncio.wait([running], timeout=kept_every_s)
            if ended:
                return
            try:
                await self._sessions.store.info(session_id, self._caller.namespace)
            except (StoreFailure, RolloutFailure) as error:
                # The agent notices it at its next call, if it is so.
                logger.warning("The session of a run cannot be asked: %s", error)

    async def _with_record(
        self, limits: SessionLimits, session_id: str, outcome: StepOutcome | None, failure: RolloutFailure | None
    ) -> AgentRunOutcome:
        """The run with what the session has recorded of it. Raises what the session store raises."""
        store = self._sessions.store
        info = await store.end(session_id, self._caller.namespace)
        settled_at = asyncio.get_running_loop().time() + _SETTLED_WITHIN_S
        while info.calls_in_flight and asyncio.get_running_loop().time() < settled_at:
            await asyncio.sleep(_SETTLED_POLL_S)
            info = await store.info(session_id, self._caller.namespace)
        recorded = await store.samples(session_id, self._caller.namespace)
        reward = outcome.reward if outcome is not None and isinstance(outcome.reward, dict) else {}
        metrics = {} if outcome is None else outcome.metrics or {}
        return AgentRunOutcome(recorded.samples, info.calls, reward, metrics, _limit_of(info, limits), failure)


async def _step_outcome(step: Coroutine[Any, Any, StepOutcome]) -> StepOutcome:
    return await step


def _step_request(request: AgentRunRequest, opened: SessionInfo) -> StepRequest:
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


def _limit_of(info: SessionInfo, limits: SessionLimits) -> SessionLimit | None:
    """The limit that a session has reached, beyond which it refuses calls."""
    if info.calls >= limits.max_calls:
        return "max_calls"
    return "max_tokens" if info.total_tokens >= limits.max_tokens else None


def _failure_of_store(error: StoreFailure | RolloutFailure) -> RolloutFailure:
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
