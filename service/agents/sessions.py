"""Sessions in the ingress: opening them, who may use which, their judgement, and the runs of agents in them.

The replicas that run agents: `deployments/agents/environment.py`.
"""

import asyncio
import hmac
import logging
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from typing import TYPE_CHECKING
from uuid import uuid4

from deployments.agents.programs import AgentCall
from deployments.failures import Overloaded, RolloutFailure, SessionStoreLost, StoreFailure, VersionReplaced
from deployments.policy.failures import PolicyFailure
from deployments.protocols.chat import judged_log
from deployments.protocols.environments import StepRequest
from deployments.protocols.generation import Environment
from deployments.rpc.background_tasks import BackgroundTasks
from deployments.sessions.records import (
    GenerationUnknown,
    JudgementFailed,
    OpenSession,
    SessionLimitReached,
    SessionNotJudgeable,
)
from rollout_client.contract.messages import Message
from rollout_client.contract.sessions import SessionInfo, SessionLimits, SessionRequest, SessionReward, SessionSample
from rollout_env import StepOutcome
from service.access.access_control import AccessControl, key_in, not_authenticated
from service.access.keys import Caller, hash_of
from service.remote.policy import RemotePolicy
from service.rollouts.agent_episode import AgentRunOutcome, AgentRunRequest, Agents, SessionLimit
from service.rollouts.metrics import UNNAMED_REWARD
from service.rollouts.retries import RetryBudget, with_retries

if TYPE_CHECKING:
    from deployments.sessions.store import SessionStore

_KEY_PREFIX = "session-"
_KEY_BYTES = 32
_MOST_REMEMBERED = 10_000
_JUDGE_RETRIES = 2
"""Retries of a step that fails because its replica does."""
_SETTLED_WITHIN_S = 2.0
"""Wait after the end of a run for its calls to end and be recorded."""
_SETTLED_POLL_S = 0.05
_KEPT_EACH_IDLE_TIME = 3
"""Times that a session is used by its run within `idle_s`, so that it expires soon after an ingress that has died."""
logger = logging.getLogger("rollout_service.agents")


class AgentSessions:
    """The sessions of one ingress replica.

    Args:
        environments: judge sessions, by task.
        base_url: the `sessions.base_url` of the config.
    """

    def __init__(
        self,
        store: "SessionStore",
        policy: RemotePolicy,
        access: AccessControl,
        environments: Mapping[str, Environment],
        base_url: str | None = None,
    ) -> None:
        self.store = store
        self._policy = policy
        self._access = access
        self._environments = environments
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
        opening = self._tasks.start(self.store.open(opened), Context())
        try:
            info = await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._tasks.start(self._delete_opened(opening, opened), Context())
            raise
        return info.model_copy(update={"api_key": key})

    def start_deleting(self, session_id: str, namespace: str) -> None:
        """Deletes a session, also while its rollout is cancelled."""
        self._tasks.start(self._delete(session_id, namespace), Context())

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
        """Sets a reward, which the environment of the session's task computes where it is asked to judge.

        Raises:
            SessionFailure: what `SessionStore.reward` raises.
            SessionNotJudgeable: nothing was generated, or the session has no task that the service knows.
            GenerationUnknown: the session has not generated the message that is rewarded.
            JudgementFailed: the environment refuses the conversation, or breaks.
        """
        if reward.judge:
            samples = (await self.store.samples(session_id, namespace)).samples
            rewards = await self._judgement(*_judged(samples, reward.generation_id), request_id)
            # An environment may name more parts than a caller.
            reward = SessionReward.model_construct(rewards=rewards, generation_id=reward.generation_id)
        return await self.store.reward(session_id, namespace, reward)

    async def _judgement(self, sample: SessionSample, log: Sequence[Message], request_id: str) -> dict[str, float]:
        """The reward of one step of the environment, by names."""
        environment = self._environments.get(sample.task_name)
        if environment is None:
            known = f"the service has no task {sample.task_name!r}, only {', '.join(self._environments)}"
            without = "it was opened without a sample, whose task_name names the environment"
            reason = f"{known if sample.task_name else without}; send a reward"
            raise SessionNotJudgeable.of("judge", reason, sample.session_id)
        step = StepRequest(
            message_log=judged_log(log),
            extra_env_info=sample.extra_env_info,
            request_id=request_id,
            rollout_id=sample.session_id,
            sample=sample.idx,
            step_id=uuid4().hex,
            # Of this judgement alone: an agent steps no environment, so that no session of one goes on.
            session_id=uuid4().hex,
        )
        try:
            budget = RetryBudget({"request_id": request_id, "session_id": sample.session_id}, _JUDGE_RETRIES)
            reward = (await with_retries(lambda: environment.step(step), budget)).reward
        except RolloutFailure as failure:
            raise JudgementFailed.of("judge", str(failure).removesuffix("."), failure.kind) from failure
        finally:
            environment.release(step.session_id)
        return reward if isinstance(reward, dict) else {UNNAMED_REWARD: reward}

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
        self._remembered[session_id] = session
        self._remembered.move_to_end(session_id)
        if len(self._remembered) > _MOST_REMEMBERED:
            self._remembered.popitem(last=False)
        return session

    async def caller_of(self, session: OpenSession) -> Caller:
        """Who opened the session. Raises `RequestProblem` (401, 403): they may not go on."""
        return await self._access.caller_named(session.namespace or None, "rollout")


def _judged(samples: Sequence[SessionSample], generation_id: str | None) -> tuple[SessionSample, Sequence[Message]]:
    """The branch that was generated last, of those that hold the message, and its conversation up to the message.

    Args:
        generation_id: by default the last message.

    Raises:
        SessionNotJudgeable: nothing was generated.
        GenerationUnknown: not this message.
    """
    if not samples:
        raise SessionNotJudgeable.of("judge", "it has generated nothing yet, or it is gone")
    if generation_id is None:
        return samples[-1], samples[-1].message_log
    held = [sample for sample in samples if generation_id in sample.generation_ids]
    if not held:
        raise GenerationUnknown.of("generation_id", "the session has generated no such message", generation_id)
    log, number = held[-1].message_log, held[-1].generation_ids.index(generation_id)
    places = [place for place, message in enumerate(log) if message.generation_logprobs is not None]
    return held[-1], log[: places[number] + 1]


class RequestAgents(Agents):
    """Runs the agents of the rollouts of one request: each in a session of its own, whose record it returns.

    Args:
        programs: the deployments that run the agents, by task.
        address: the service's, for a replica on any node, unless `sessions.base_url` names another one.
        caller: who posted the request.
    """

    def __init__(
        self, sessions: AgentSessions, programs: Mapping[str, Environment], address: str, caller: Caller
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
        running = self._running[request.rollout_id] = asyncio.create_task(step)
        try:
            while not (await asyncio.wait([running], timeout=request.session.limits.idle_s / _KEPT_EACH_IDLE_TIME))[0]:
                # The agent may make no call for long. If the session is gone, it notices that at its next one.
                with suppress(StoreFailure, RolloutFailure):
                    await self._sessions.store.info(opened.id, self._caller.namespace)
        except BaseException:
            running.cancel()
            await asyncio.wait([running])
            raise
        outcome: StepOutcome | None = None
        failure: RolloutFailure | None = None
        try:
            # One that was interrupted has no outcome.
            outcome = None if running.cancelled() else running.result()
        except RolloutFailure as error:
            failure = error
        try:
            return await self._with_record(request.session.limits, opened.id, outcome, failure)
        except (StoreFailure, RolloutFailure) as error:
            return AgentRunOutcome(failure=failure or _failure_of_store(error))

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
    if isinstance(error, RolloutFailure):
        return error
    if isinstance(error, SessionLimitReached):
        return Overloaded(f"No session can be opened for the agent now: {error}")
    if isinstance(error, PolicyFailure):
        return VersionReplaced(str(error))
    return SessionStoreLost(f"The session of the agent is gone: {error}")
