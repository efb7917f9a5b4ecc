"""Sessions in the ingress: who may use which, and with what their calls reach a replica."""

import asyncio
import hmac
import logging
import secrets
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from deployments.failures import RolloutFailure, StoreFailure
from deployments.protocols.model_server import Endpoint
from deployments.rpc.background_tasks import BackgroundTasks
from deployments.sessions.records import OpenSession
from rollout_client.contract.sessions import SessionInfo, SessionRequest, SessionReward
from service.access.access_control import AccessControl, key_in, not_authenticated
from service.access.keys import Caller, hash_of
from service.agents.session_judge import SessionJudge
from service.model_server.calls import ModelAnswer, ModelCalls
from service.remote.policy import RemotePolicy

if TYPE_CHECKING:
    from deployments.sessions.store import SessionStore

KEY_PREFIX = "session-"
KEY_BYTES = 32
MOST_REMEMBERED = 10_000
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
        calls: ModelCalls,
        policy: RemotePolicy,
        access: AccessControl,
        judge: SessionJudge,
        base_url: str | None = None,
    ) -> None:
        self.store = store
        self._calls = calls
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
        session_id, key = uuid4().hex, KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
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

    async def answer(
        self,
        endpoint: Endpoint,
        body: bytes,
        request_id: str,
        session: OpenSession,
        caller: Caller,
        choices: int = 1,
    ) -> ModelAnswer:
        """Raises what `ModelCalls.answer` and `open` raise."""
        await self._policy.wait_for_version(session.request.policy)
        return await self._calls.answer(endpoint, body, request_id, caller, session, choices)

    def _remember(self, session: OpenSession) -> None:
        self._remembered[session.id] = session
        self._remembered.move_to_end(session.id)
        if len(self._remembered) > MOST_REMEMBERED:
            self._remembered.popitem(last=False)
