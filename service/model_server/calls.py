"""Calls of OpenAI's and Anthropic's APIs in the ingress: who may make them, what they count, which replica answers."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from uuid import uuid4
from zlib import crc32

from deployments.failures import GenerationLost
from deployments.protocols.generation import RequestShare, SamplingOptions, included_columns
from deployments.protocols.model_server import (
    BYTES_PER_TOKEN,
    GENERATED,
    Endpoint,
    ModelServer,
    ServedPart,
    ServedRequest,
)
from deployments.seeds import derived_seed
from deployments.sessions.records import OpenSession
from rollout_client.contract.base import PolicyDemand, Priority
from service.access.keys import Caller
from service.admission.admission import Admission
from service.admission.key_usage import KeyUsage
from service.scheduling.priority import share_of

PRIORITY: Priority = "interactive"
"""Somebody waits for a call of these APIs."""
FORGET_AFTER_S = 600.0
ANY_WEIGHTS = PolicyDemand()


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """An answer that has begun."""

    status: int
    media_type: str
    body: AsyncGenerator[bytes, None]
    parts: AsyncGenerator[ServedPart, None]
    """The source of `body`."""

    async def aclose(self) -> None:
        """Aborts the call, unless it has ended, also when nobody has begun to read the body."""
        await self.body.aclose()
        await self.parts.aclose()


class ModelCalls:
    """The model server's calls of one ingress replica.

    Args:
        token_timeout_s: the `limits.generation_timeout_s` of the config.
    """

    def __init__(self, server: ModelServer, admission: Admission, token_timeout_s: float | None = None) -> None:
        self._server = server
        self._admission = admission
        self._token_timeout_s = token_timeout_s
        self._forgetting: dict[str, asyncio.TimerHandle] = {}
        """By session."""
        self._in_flight: Counter[str] = Counter()
        """Calls by session."""

    async def answer(
        self,
        endpoint: Endpoint,
        body: bytes,
        request_id: str,
        caller: Caller,
        session: OpenSession | None = None,
        choices: int = 1,
        demand: PolicyDemand = ANY_WEIGHTS,
        share: RequestShare | None = None,
    ) -> ModelAnswer:
        """Returns when the answer has begun.

        Args:
            session: the one that records the call. It has a demand of its own.
            choices: how many answers the body asks for.
            demand: which weights make all of the answer; they were waited for.
            share: the party as which it shares the engines; by default one of its own.

        Raises:
            RolloutFailure: no replica could answer.
        """
        request = self._request(endpoint, body, request_id, caller, choices)
        if share is not None:
            request = replace(request, share=share)
        request = of_policy(request, demand) if session is None else of_session(request, session, caller)
        return await begun(self._counted(request, caller))

    def _request(self, endpoint: Endpoint, body: bytes, request_id: str, caller: Caller, choices: int) -> ServedRequest:
        call_id = uuid4().hex
        return ServedRequest(
            generation_id=call_id,
            prompt_token_ids=range(min(len(body) // BYTES_PER_TOKEN + 1, self._admission.max_model_len)),
            max_new_tokens=self._admission.max_model_len,
            stop_strings=(),
            sampling=SamplingOptions(),
            rollout_id=call_id,
            group=call_id,
            request_id=request_id,
            token_timeout_s=self._token_timeout_s,
            share=share_of(call_id, PRIORITY, caller),
            endpoint=endpoint,
            body=body,
            choices=choices,
        )

    async def _counted(self, request: ServedRequest, caller: Caller) -> AsyncGenerator[ServedPart, None]:
        """The parts of the answer. The tokens of the call count against the quota of the caller's key."""
        usage = self._admission.usage_of(caller)
        self._in_flight[request.rollout_id] += 1
        try:
            served = self._server.serve(request)
            async with aclosing(served if usage is None else metered(served, request, usage)) as parts:
                async for part in parts:
                    yield part
        finally:
            self._in_flight[request.rollout_id] -= 1
            if not self._in_flight[request.rollout_id]:
                del self._in_flight[request.rollout_id]
            self._end(request)

    def _end(self, request: ServedRequest) -> None:
        """A session that makes no call for long is forgotten by the scheduler: its prefix is no longer cached."""
        if request.session_id is None:
            self._server.release(request.rollout_id)
            return
        if (before := self._forgetting.pop(request.session_id, None)) is not None:
            before.cancel()
        forget = asyncio.get_running_loop().call_later(FORGET_AFTER_S, self._forget, request.session_id)
        self._forgetting[request.session_id] = forget

    def _forget(self, session_id: str) -> None:
        del self._forgetting[session_id]
        if session_id not in self._in_flight:
            self._server.release(session_id)


async def metered(
    parts: AsyncGenerator[ServedPart, None], request: ServedRequest, usage: KeyUsage
) -> AsyncGenerator[ServedPart, None]:
    """Counts the tokens of a call as `MeteredGenerator` does: one that fails gets its charge back, one that is left
    keeps it.
    """
    generates = request.endpoint in GENERATED
    expected = float(len(request.prompt_token_ids))
    if generates:
        expected += request.choices * usage.expected_tokens(request.max_new_tokens)
    await usage.take(expected)
    try:
        async with aclosing(parts):
            async for part in parts:
                if part.tokens is not None:
                    usage.charge(part.tokens.prompt + part.tokens.generated - expected)
                    expected = part.tokens.prompt + part.tokens.generated
                    if part.tokens.generated:
                        usage.learn(part.tokens.generated / request.choices)
                yield part
    except Exception:
        usage.charge(-expected)
        raise


def of_policy(request: ServedRequest, demand: PolicyDemand) -> ServedRequest:
    """The call as one that these weights answer."""
    return replace(
        request,
        min_weight_version=max(demand.min_version or 0, demand.version or 0),
        weight_version=demand.version,
        policy=demand.name,
    )


def of_session(request: ServedRequest, session: OpenSession, caller: Caller) -> ServedRequest:
    """The call as one of the session, all of whose calls go where its prefix is cached."""
    asked = session.request
    demand, sampling = asked.policy, asked.sampling
    if sampling.seed is not None:
        # The same call of a session samples alike; other calls, and those of the group's other sessions, differently.
        seed = derived_seed(sampling.seed, asked.generation_index, crc32(request.body))
        sampling = sampling.model_copy(update={"seed": seed})
    return replace(
        of_policy(request, demand),
        rollout_id=session.id,
        group=session.id,
        share=share_of(session.share_id or session.id, asked.priority, caller),
        max_staleness=demand.max_staleness,
        session_id=session.id,
        session_sampling=sampling,
        generation_index=asked.generation_index,
        include=included_columns(asked.include),
    )


async def begun(parts: AsyncGenerator[ServedPart, None]) -> ModelAnswer:
    """The answer once its first part is there."""
    async for first in parts:
        if first.status is not None:
            return ModelAnswer(first.status, first.media_type, bodies(first, parts), parts)
    raise GenerationLost("The generator replica ended the call without an answer.")


async def bodies(first: ServedPart, parts: AsyncGenerator[ServedPart, None]) -> AsyncGenerator[bytes, None]:
    if first.body:
        yield first.body
    async for part in parts:
        if part.body:
            yield part.body
