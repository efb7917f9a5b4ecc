"""Admits `POST /rollout`, `/score` and calls of model servers' APIs, and holds their reservations until they end."""

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Lock

from deployments.protocols.generation import Generator
from rollout_client.contract.problems import FieldProblem
from rollout_client.contract.rollouts import RolloutRequest
from service.access.keys import ANYBODY, Caller
from service.admission.capacity import (
    RESOURCES,
    Amounts,
    Bound,
    BoundExceeded,
    Capacity,
    CapacityExhausted,
    Reservation,
    Resource,
)
from service.admission.key_usage import KeyUsage, MeteredGenerator
from service.problems import (
    NOT_READY,
    OVERLOADED,
    QUOTA_EXCEEDED,
    ProblemType,
    RequestProblem,
    body_too_large,
    invalid_request,
    refused_for_now,
)
from service.settings import AdmissionBounds, AdmissionSettings

SHUT_DOWN = "the service is being shut down; try again where, or when, it runs again"
SHUT_DOWN_RETRY_AFTER_S = 5
RETRY_AFTER_S = (4, 8)
"""Range of the wait that a refused caller is told. It is drawn, so that those who were refused together come back at
different times."""
DRAINED_POLL_S = 0.1
LEAST_WANTED = Amounts(rollouts=1, tokens=1)
"""The least that a request needs, as far as is known before its body is read."""
KEYS_BESIDE = 2
"""Number of keys whose bodies fit side by side."""
FIELDS: dict[Resource, str] = {"rollouts": "samples", "tokens": "max_seq_len", "body_bytes": "body"}
"""The field of a `POST /rollout` that asks for too much."""
SCORE_FIELDS: dict[Resource, str] = {"rollouts": "sequences", "tokens": "sequences", "body_bytes": "body"}
"""The field of a `POST /score`: a sequence counts as a rollout."""
NOUNS: dict[Resource, str] = {"rollouts": "rollouts", "tokens": "requested tokens", "body_bytes": "bytes of bodies"}
ADVICE: dict[Resource, str] = {
    "rollouts": "split the request",
    "tokens": "split the request, or lower max_seq_len or sampling.max_new_tokens",
    "body_bytes": "split the request",
}


@dataclass(frozen=True, slots=True)
class _Hold:
    """A request's reservation in one capacity, and the problem type that refuses it where that is used up."""

    capacity: Capacity
    used_up: ProblemType
    reservation: Reservation = field(default_factory=Reservation)


class Admission:
    """The admission of one ingress replica. Threads may share it: a body is decompressed in a thread."""

    def __init__(
        self,
        settings: AdmissionSettings,
        max_model_len: int,
        ingress_replicas: Callable[[], int] = lambda: 1,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is in flight at first.

        Args:
            max_model_len: tokens that a rollout has at most, where its request does not say.
            ingress_replicas: how many replicas share the bounds of the service and the quotas of keys.
            now_s: the clock.
        """
        self.settings = settings
        self._capacity = Capacity()
        self.max_model_len = max_model_len
        self._ingress_replicas = ingress_replicas
        self._lock = Lock()
        self._usage_by_key: dict[str, KeyUsage] = {}
        self._now_s = now_s
        self._refuses_new = False

    @property
    def in_flight(self) -> Amounts:
        return self._capacity.in_flight

    @contextmanager
    def admitted(
        self, body_bytes: int, caller: Caller = ANYBODY, stated_bytes: int = 0, is_of_rollout: bool = False
    ) -> Iterator["AdmittedRequest"]:
        """Admits a request by its headers, before its body is read; frees all that it holds when the block ends.

        Args:
            body_bytes: size of the part of its body that has arrived.
            caller: sender of the request.
            stated_bytes: size that its headers give, 0 where they give none. There must be room for it, but none is
                reserved: a client that declares a large body and sends nothing must not block others.
            is_of_rollout: whether it is a call of a rollout that was admitted before. Then only its body counts, and it
                is admitted while this drains, so that the rollout can end.

        Raises:
            RequestProblem: 429 with `Retry-After` if there is no room now, or the caller's key has used up a quota; 413
                if the body can never be admitted; 503 while this drains.
        """
        if self._refuses_new and not is_of_rollout:
            raise refused_for_now(NOT_READY, SHUT_DOWN, SHUT_DOWN_RETRY_AFTER_S)
        self._capacity.bounds = _bounds_of(self.settings, self._ingress_replicas())
        holds = [_Hold(self._capacity, OVERLOADED)]
        with self._lock:
            usage = self._usage_by(caller)
        if usage is not None:
            if not is_of_rollout:
                _refuse_without_tokens(usage)
            # First: a request over its quota must not take what others could have.
            holds.insert(0, _Hold(usage.capacity, QUOTA_EXCEEDED))
        for hold in holds:
            with _refusals(hold, FIELDS), self._lock:
                hold.capacity.check(Amounts(body_bytes=stated_bytes))
        try:
            least = Amounts() if is_of_rollout else LEAST_WANTED
            self.grow(holds, replace(least, body_bytes=body_bytes))
            yield AdmittedRequest(self, holds, is_of_rollout)
        finally:
            self.close(holds)

    async def drain(self, bound_s: float) -> int:
        """Refuses new requests, and waits up to `bound_s` seconds for those in flight to end.

        Returns:
            The number of rollouts that are still in flight.
        """
        self._refuses_new = True
        ends_at = self._now_s() + bound_s
        while self.in_flight.rollouts and self._now_s() < ends_at:
            await asyncio.sleep(DRAINED_POLL_S)
        return self.in_flight.rollouts

    def close(self, holds: Sequence[_Hold]) -> None:
        """Releases the reservations; idempotent."""
        with self._lock:
            for hold in holds:
                hold.capacity.close(hold.reservation)

    def usage_of(self, caller: Caller) -> KeyUsage | None:
        """Usage of the token quota of the caller's key; `None` if it has no such quota."""
        usage = self._usage_by(caller)
        return usage if usage is not None and usage.has_token_quota else None

    def metered(self, generator: Generator, caller: Caller) -> Generator:
        """The generator for one request of `caller`: it counts against the quota of its key, if that has one."""
        usage = self.usage_of(caller)
        return generator if usage is None else MeteredGenerator(generator, usage)

    def sandboxes_of(self, caller: Caller) -> AbstractAsyncContextManager[None]:
        """The sandboxes of the caller's key. A task that enters waits while those are as many as its quota allows."""
        usage = self._usage_by(caller)
        return nullcontext() if usage is None else usage.sandboxes

    def _usage_by(self, caller: Caller) -> KeyUsage | None:
        """Usage by the caller's key, with the quotas that it has now; `None` for a caller without one."""
        if caller.name is None:
            return None
        if (usage := self._usage_by_key.get(caller.name)) is None:
            usage = KeyUsage(caller.name, self._ingress_replicas, self._now_s, _bounds_of_key(self.settings.replica))
            self._usage_by_key[caller.name] = usage
        usage.set_quotas(caller.quotas)
        return usage

    def amounts_of_call(self, choices: int, most_tokens: int | None = None) -> Amounts:
        """Amounts for a call of a model server's API: each choice counts as a rollout, of the longest length unless
        `most_tokens` says how many it has with its prompt."""
        return Amounts(choices, choices * (most_tokens or self.max_model_len))

    def amounts_of(self, request: RolloutRequest) -> Amounts:
        rollouts = request.groups_at_once * request.num_generations
        most_tokens = request.max_seq_len or self.max_model_len
        if request.sampling.max_new_tokens is not None:
            most_tokens = min(most_tokens, request.max_rollout_turns * request.sampling.max_new_tokens)
        return Amounts(rollouts, rollouts * most_tokens)

    def grow(self, holds: Sequence[_Hold], wanted: Amounts, fields: Mapping[Resource, str] = FIELDS) -> None:
        """Raises `RequestProblem`: 429 for later, 413 or 422 for never; `fields` are those that ask for too much."""
        for hold in holds:
            with _refusals(hold, fields), self._lock:
                hold.capacity.grow(hold.reservation, wanted)


class AdmittedRequest:
    """A request that was admitted by its headers. Its reservation grows while its body is read and parsed."""

    def __init__(self, admission: Admission, holds: Sequence[_Hold], is_of_rollout: bool = False) -> None:
        self._admission = admission
        self._holds = holds
        self._is_of_rollout = is_of_rollout

    def hold_body(self, size_bytes: int) -> None:
        """Raises `RequestProblem` (429, 413) if the body, of which so much was read, cannot be held."""
        held = self._holds[-1].reservation.held
        if size_bytes > held.body_bytes:
            self._admission.grow(self._holds, replace(held, body_bytes=size_bytes))

    def free(self) -> None:
        """Frees what the request holds, before its response is sent: a job holds its own."""
        self._admission.close(self._holds)

    def hold_rollouts(self, request: RolloutRequest) -> None:
        """Raises `RequestProblem` (429, 422) if the rollouts of the parsed request cannot be held."""
        self._admission.grow(self._holds, self._admission.amounts_of(request))

    def hold_call(self, choices: int, field: str, most_tokens: int | None = None) -> None:
        """Raises `RequestProblem` (429, 422) if a call of a model server's API for so many choices cannot be held.

        Args:
            field: the one that asks for so many.
            most_tokens: of the prompt and one choice together, where they are known.
        """
        if not self._is_of_rollout:
            fields: dict[Resource, str] = {"rollouts": field, "tokens": field, "body_bytes": "body"}
            self._admission.grow(self._holds, self._admission.amounts_of_call(choices, most_tokens), fields)

    def hold_sequences(self, sequences: int, tokens: int) -> None:
        """Raises `RequestProblem` (429, 422) if so many sequences with so many tokens cannot be held."""
        self._admission.grow(self._holds, Amounts(sequences, tokens), SCORE_FIELDS)


def _bounds_of(settings: AdmissionSettings, ingress_replicas: int) -> list[Bound]:
    """The bounds of a replica, and its equal share of those of the service, which a single request may exceed."""
    bounds: list[Bound] = []
    for resource in RESOURCES:
        if (most := getattr(settings.replica, f"max_{resource}")) is not None:
            bounds.append(Bound(resource, most, f"admission.replica.max_{resource}"))
        if (most := getattr(settings.service, f"max_{resource}")) is not None:
            share = math.ceil(most / ingress_replicas)
            bounds.append(Bound(resource, share, f"admission.service.max_{resource}", most))
    return bounds


def _bounds_of_key(settings: AdmissionBounds) -> list[Bound]:
    """Half of the room for bodies: no key keeps all others out. A single body may be larger."""
    most = settings.max_body_bytes
    if most is None:
        return []
    return [Bound("body_bytes", most // KEYS_BESIDE, "admission.replica.max_body_bytes (half for one key)", most)]


@contextmanager
def _refusals(hold: _Hold, fields: Mapping[Resource, str]) -> Iterator[None]:
    """Raises `RequestProblem` for what a capacity raises: 429 for later, 413 or 422 for never."""
    try:
        yield
    except BoundExceeded as error:
        raise _never_admitted(error, fields) from error
    except CapacityExhausted as error:
        raise _not_admitted_now(error, hold.used_up) from error


def _never_admitted(error: BoundExceeded, fields: Mapping[Resource, str]) -> RequestProblem:
    resource = error.bound.resource
    message = (
        f"{error.wanted} {NOUNS[resource]} are more than {error.bound.setting} allows, which is "
        f"{max(error.bound.most, error.bound.most_of_one)}; {ADVICE[resource]}"
    )
    if resource == "body_bytes":
        return body_too_large(message)
    return invalid_request(FieldProblem(field=fields[resource], message=message))


def _refuse_without_tokens(usage: KeyUsage) -> None:
    """Raises `RequestProblem` (429) while the key has no tokens left."""
    if (wait_s := usage.wait_s()) > 0:
        retry_after_s = math.ceil(wait_s)
        message = f"the key has used up its tokens_per_minute; try again in {retry_after_s} s"
        raise refused_for_now(QUOTA_EXCEEDED, message, retry_after_s)


def _not_admitted_now(error: CapacityExhausted, used_up: ProblemType) -> RequestProblem:
    retry_after_s = random.randint(*RETRY_AFTER_S)
    return refused_for_now(
        used_up,
        f"{error.in_flight} {NOUNS[error.bound.resource]} are in flight here and {error.bound.setting} allows "
        f"{error.bound.most}; try again in {retry_after_s} s",
        retry_after_s,
    )
