"""Calls of model servers' APIs in the ingress: who may make them, what they count, which replica answers."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4
from zlib import crc32

from pydantic_core import from_json

from deployments.failures import GenerationLost
from deployments.protocols.generation import RequestShare, SamplingOptions, derived_seed, included_columns
from deployments.protocols.model_server import (
    BYTES_PER_TOKEN,
    TOKEN_ENDPOINTS,
    CallsToAbort,
    Endpoint,
    ModelServer,
    ServedPart,
    ServedRequest,
)
from deployments.sessions.records import OpenSession
from rollout_client.contract.base import PolicyDemand, Priority
from service.access.keys import Caller
from service.admission.admission import Admission
from service.remote.policy import RemotePolicy
from service.scheduling.fair_queue import share_of

_PRIORITY: Priority = "interactive"
"""Somebody waits for a call of OpenAI's and Anthropic's APIs."""
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

    async def whole(self) -> bytes:
        """The body of an answer that is no stream."""
        async with aclosing(self):
            return b"".join([part async for part in self.body])

    async def aclose(self) -> None:
        """Aborts the call, unless it has ended, also when nobody has begun to read the body."""
        await self.body.aclose()
        await self.parts.aclose()


class ModelCalls:
    """The model server's calls of one ingress replica."""

    def __init__(
        self, server: ModelServer, policy: RemotePolicy, admission: Admission, model_names: Collection[str] = ()
    ) -> None:
        """`model_names` mean the policy without a name where a call gives them as its `model`."""
        self._model_names = model_names
        self._server = server
        self._policy = policy
        self._admission = admission
        self._name = uuid4().hex
        self._forgetting: dict[str, asyncio.TimerHandle] = {}
        """By session or routing key."""
        self._in_flight: Counter[str] = Counter()
        """Likewise."""
        self._token_calls: Counter[str | None] = Counter()
        """Calls of token ids by the name of their caller's key."""

    def token_calls_of(self, caller: Caller) -> int:
        """How many calls of token ids of the caller's key are in flight."""
        return self._token_calls[caller.name]

    async def demand_of_model(self, model: Any, demand: PolicyDemand) -> PolicyDemand:
        """`demand`, with the named policy that a call gives as its `model`, where it says no other."""
        if demand.name is not None or not isinstance(model, str) or model in self._model_names:
            return demand
        return demand.model_copy(update={"name": model}) if await self._policy.has_policy(model) else demand

    def end_routing_key(self, routing_key: str, caller: Caller) -> None:
        """No call of the key follows: once none is in flight, the scheduler forgets where its prefix lies."""
        party = _party_of(routing_key, caller)
        if (forgetting := self._forgetting.get(party)) is not None:
            forgetting.cancel()
            self._forget(party)

    async def abort(self, rid: str, caller: Caller) -> None:
        """Ends the caller's calls of `/generate` whose `rid` begins so, with the tokens that they have.

        Raises:
            GenerationLost: no replica answers.
        """
        await self._server.abort_calls(CallsToAbort(caller.name, rid, self._name, time.monotonic()))

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
        routing_key: str | None = None,
    ) -> ModelAnswer:
        """Waits for the weights that the call demands, and returns when the answer has begun.

        Args:
            session: the one that records the call. It has a demand of its own.
            choices: how many answers the body asks for.
            demand: which weights make all of the answer.
            share: the party as which it shares the engines; by default one of its own.
            routing_key: calls of one key go where the earlier ones have left their prefix, as far as it is free.

        Raises:
            PolicyNotCurrent: the weights that it demands are not current, and do not become current in time.
            PolicyUnknown: it demands a policy that does not exist.
            RolloutFailure: no replica could answer.
        """
        await self._policy.wait_for_version(demand if session is None else session.request.policy)
        call_id = uuid4().hex
        party = call_id if routing_key is None else _party_of(routing_key, caller)
        request = ServedRequest(
            generation_id=call_id,
            prompt_token_ids=range(min(len(body) // BYTES_PER_TOKEN + 1, self._admission.max_model_len)),
            max_new_tokens=self._admission.max_model_len,
            stop_strings=(),
            sampling=SamplingOptions(),
            rollout_id=party,
            group=party,
            request_id=request_id,
            share=share or share_of(call_id, _PRIORITY, caller),
            endpoint=endpoint,
            body=body,
            choices=choices,
            ingress=self._name,
            received_at=time.monotonic(),
        )
        request = _of_policy(request, demand) if session is None else _of_session(request, session, caller)
        return await _begun(self._parts(request, caller))

    async def _parts(self, request: ServedRequest, caller: Caller) -> AsyncGenerator[ServedPart, None]:
        self._in_flight[request.rollout_id] += 1
        counts = request.endpoint in TOKEN_ENDPOINTS
        self._token_calls[caller.name] += counts
        try:
            async with aclosing(self._server.serve(request)) as parts:
                async for part in parts:
                    yield part
        finally:
            self._token_calls[caller.name] -= counts
            self._in_flight[request.rollout_id] -= 1
            if not self._in_flight[request.rollout_id]:
                del self._in_flight[request.rollout_id]
            self._end(request)

    def _end(self, request: ServedRequest) -> None:
        """A session or key that makes no call for long is forgotten by the scheduler, as its prefix is."""
        party = request.rollout_id
        if party == request.generation_id:
            self._server.release(party)
            return
        if (before := self._forgetting.pop(party, None)) is not None:
            before.cancel()
        self._forgetting[party] = asyncio.get_running_loop().call_later(FORGET_AFTER_S, self._forget, party)

    def _forget(self, party: str) -> None:
        del self._forgetting[party]
        if party not in self._in_flight:
            self._server.release(party)


def _party_of(routing_key: str, caller: Caller) -> str:
    return f"key {caller.name or ''} {routing_key}"


def _of_policy(request: ServedRequest, demand: PolicyDemand) -> ServedRequest:
    """The call as one that these weights answer."""
    return replace(
        request,
        min_weight_version=max(demand.min_version or 0, demand.version or 0),
        weight_version=demand.version,
        policy=demand.name,
    )


def _of_session(request: ServedRequest, session: OpenSession, caller: Caller) -> ServedRequest:
    """The call as one of the session, all of whose calls go where its prefix is cached."""
    asked = session.request
    demand, sampling = asked.policy, asked.sampling
    if sampling.seed is not None:
        # The same call of a session samples alike; other calls, and those of the group's other sessions, differently.
        seed = derived_seed(sampling.seed, asked.generation_index, crc32(request.body))
        sampling = sampling.model_copy(update={"seed": seed})
    return replace(
        _of_policy(request, demand),
        rollout_id=session.id,
        group=session.id,
        share=share_of(session.share_id or session.id, asked.priority, caller),
        max_staleness=demand.max_staleness,
        session_id=session.id,
        session_sampling=sampling,
        generation_index=asked.generation_index,
        include=included_columns(asked.include),
    )


async def _begun(parts: AsyncGenerator[ServedPart, None]) -> ModelAnswer:
    """The answer once its first part is there."""
    async for first in parts:
        if first.status is not None:
            return ModelAnswer(first.status, first.media_type, _bodies(first, parts), parts)
    raise GenerationLost("The generator replica ended the call without an answer.")


async def _bodies(first: ServedPart, parts: AsyncGenerator[ServedPart, None]) -> AsyncGenerator[bytes, None]:
    if first.body:
        yield first.body
    async for part in parts:
        if part.body:
            yield part.body


def refusal_in(body: bytes) -> tuple[str, str]:
    """The type and the sentence of a model server's refusal."""
    try:
        error = from_json(body)["error"]
        return str(error.get("type", "error")), str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return "error", body.decode(errors="replace")
