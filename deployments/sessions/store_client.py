"""The session store over its Serve handle, for ingress and generator replicas: the client of `store.SessionStore`."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ray.serve.handle import DeploymentHandle
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from deployments.failures import SessionStoreLost
from deployments.rpc.batching import CallBatcher, at_once
from deployments.rpc.handle_calls import call_result
from deployments.rpc.message_size import (
    BYTES_PER_LOGPROB,
    BYTES_PER_RECORD,
    BYTES_PER_TOKEN_ID,
    bytes_of_json,
    bytes_of_text,
)
from deployments.sessions.records import ChatContext, ChatMessage, EngineCall, OpenSession, Plan
from deployments.storage.storage import StoreReplaced
from rollout_client.contract.sessions import DriftReport, SessionInfo, SessionReward, SessionSamples

AWAY_S = 60.0
"""How long a call waits for a store that has died: the next one takes about ten seconds to start."""
AWAY_RETRY_S = 0.5
PlanArguments = tuple[str, str, Sequence[ChatMessage], ChatContext]
"""Of `plan`."""


class SessionStoreClient:
    """Has the methods of `SessionStore`.

    Each raises what the store raises, and `SessionStoreLost` if the store cannot be reached for `AWAY_S` seconds;
    `answer` and `heard` raise it at once.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        # Of these, which generator replicas make for each call of a session, many come at one moment. A plan does not
        # wait for calls to be stored.
        self._plans: CallBatcher[PlanArguments, Plan] = CallBatcher(
            at_once(partial(self._call_once, "plans")), bytes_of_plan
        )
        self._begins: CallBatcher[tuple[str, str, int], Sequence[str] | None] = CallBatcher(
            at_once(partial(self._call_once, "begins")), lambda _: BYTES_PER_RECORD
        )
        self._adds: CallBatcher[tuple[str, EngineCall], int | None] = CallBatcher(
            at_once(partial(self._call_once, "adds")), bytes_of_add
        )

    async def answer(self) -> None:
        await self._call_once("answer")

    async def open(self, opened: OpenSession) -> SessionInfo:
        info: SessionInfo = await self._call("open", opened)
        return info

    async def opened(self, session_id: str) -> OpenSession:
        opened: OpenSession = await self._call("opened", session_id)
        return opened

    async def info(self, session_id: str, namespace: str) -> SessionInfo:
        info: SessionInfo = await self._call("info", session_id, namespace)
        return info

    async def infos(self, namespace: str) -> list[SessionInfo]:
        infos: list[SessionInfo] = await self._call("infos", namespace)
        return infos

    async def samples(self, session_id: str, namespace: str) -> SessionSamples:
        samples: SessionSamples = await self._call("samples", session_id, namespace)
        return samples

    async def drift(self, session_id: str, namespace: str) -> DriftReport:
        report: DriftReport = await self._call("drift", session_id, namespace)
        return report

    async def reward(self, session_id: str, namespace: str, reward: SessionReward) -> SessionInfo:
        info: SessionInfo = await self._call("reward", session_id, namespace, reward)
        return info

    async def end(self, session_id: str, namespace: str) -> SessionInfo:
        info: SessionInfo = await self._call("end", session_id, namespace)
        return info

    async def delete(self, session_id: str, namespace: str) -> None:
        await self._call("delete", session_id, namespace)

    async def plan(self, session_id: str, call_id: str, messages: Sequence[ChatMessage], context: ChatContext) -> Plan:
        return await attempts()(self._plans.call, (session_id, call_id, messages, context))

    async def begin(self, session_id: str, call_id: str, known: int) -> Sequence[str] | None:
        return await attempts()(self._begins.call, (session_id, call_id, known))

    async def add(self, session_id: str, call: EngineCall) -> int | None:
        return await attempts()(self._adds.call, (session_id, call))

    async def end_call(self, call_id: str) -> None:
        await self._call("end_call", call_id)

    async def heard(self, calls: Mapping[str, str]) -> list[str]:
        to_abort: list[str] = await self._call_once("heard", calls)
        return to_abort

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await attempts()(self._call_once, method, *arguments)

    async def _call_once(self, method: str, *arguments: Any) -> Any:
        response: Any = getattr(self._handle, method).remote(*arguments)
        return await call_result(response, response, SessionStoreLost, "The session store")


def attempts() -> AsyncRetrying:
    """Calls again while the store is away: made twice, a call changes nothing the second time."""
    return AsyncRetrying(
        retry=retry_if_exception_type((SessionStoreLost, StoreReplaced)),
        wait=wait_fixed(AWAY_RETRY_S),
        stop=stop_after_attempt(1 + round(AWAY_S / AWAY_RETRY_S)),
        reraise=True,
    )


def bytes_of_plan(arguments: PlanArguments) -> int:
    _, _, messages, _ = arguments
    return BYTES_PER_RECORD + bytes_of_json(messages)


def bytes_of_add(arguments: tuple[str, EngineCall]) -> int:
    _, call = arguments
    rendered = sum(len(message.token_ids) for message in call.rendered)
    generated = sum(len(message.token_ids) for message in call.generated)
    texts = sum(2 * bytes_of_text(message.text) for message in call.generated)
    return (
        BYTES_PER_RECORD
        + bytes_of_json([message.message for message in call.rendered])
        + BYTES_PER_TOKEN_ID * (rendered + generated)
        + BYTES_PER_LOGPROB * generated
        + texts
    )
