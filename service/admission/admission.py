"""Admits `POST /rollout`, `/score` and calls of model servers' APIs, and holds their reservations until they end."""

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from threading import Lock

from rollout_client.contract.base import FieldProblem
from rollout_client.contract.rollouts import RolloutRequest
from service.access.keys import ANYBODY, Caller
from service.admission.capacity import RESOURCES, Amounts, Bound, Capacity, NoRoom, Reservation, Resource
from service.problems import (
    NOT_READY,
    OVERLOADED,
    QUOTA_EXCEEDED,
    ProblemType,
    body_too_large,
    invalid_request,
    refused_for_now,
)
from service.settings import AdmissionSettings

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
FIELDS: dict[Resource, str] = {"rollouts": "samples", "tokens": "max_seq_len"}
"""The field of a `POST /rollout` that asks for too much."""
SCORE_FIELDS: dict[Resource, str] = {"rollouts": "sequences", "tokens": "sequences"}
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
        self, settings: AdmissionSettings, max_model_len: int, ingress_replicas: Callable[[], int] = lambda: 1
    ) -> None:
        """Nothing is in flight at first.

        Args:
            max_model_len: tokens that a rollout has at most, where its request does not say.
            ingress_replicas: how many replicas share the quotas of keys.
        """
        self.settings = settings
        self._capacity = Capacity(_bounds_of(settings))
        self.max_model_len = max_model_len
        self._ingress_replicas = ingress_replicas
        self._lock = Lock()
        self._capacity_by_key: dict[str, Capacity] = {}
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
        holds = [_Hold(self._capacity, OVERLOADED)]
        if caller.name is not None:
            # First: a request over its quota must not take what others could have.
            holds.insert(0, _Hold(self._capacity_of(caller.name, caller.max_rollouts), QUOTA_EXCEEDED))
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
        with suppress(TimeoutError):
            async with asyncio.timeout(bound_s):
                while self.in_flight.rollouts:
                    await asyncio.sleep(DRAINED_POLL_S)
        return self.in_flight.rollouts

    def close(self, holds: Sequence[_Hold]) -> None:
        """Releases the reservations; idempotent."""
        with self._lock:
            for hold in holds:
                hold.capacity.close(hold.reservation)

    def _capacity_of(self, key: str, max_rollouts: int | None) -> Capacity:
        """The capacity for requests with keys of this name, with the quota that they have now."""
        with self._lock:
            capacity = self._capacity_by_key.setdefault(key, Capacity())
            capacity.bounds = _bounds_of_key(self.settings, key, max_rollouts, self._ingress_replicas())
        return capacity

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
        """Raises `RequestProblem` (429, 422) if a call of a model server's API cannot be held.

        Args:
            choices: number of answers that it asks for, each of which counts as a rollout.
            field: the one that asks for so many.
            most_tokens: of the prompt and one choice together; by default the longest length.
        """
        if not self._is_of_rollout:
            fields: dict[Resource, str] = {"rollouts": field, "tokens": field}
            tokens = choices * (most_tokens or self._admission.max_model_len)
            self._admission.grow(self._holds, Amounts(choices, tokens), fields)

    def hold_sequences(self, sequences: int, tokens: int) -> None:
        """Raises `RequestProblem` (429, 422) if so many sequences with so many tokens cannot be held."""
        self._admission.grow(self._holds, Amounts(sequences, tokens), SCORE_FIELDS)


def _bounds_of(settings: AdmissionSettings) -> list[Bound]:
    return [
        Bound(resource, getattr(settings, f"max_{resource}"), f"admission.max_{resource}") for resource in RESOURCES
    ]


def _bounds_of_key(
    settings: AdmissionSettings, key: str, max_rollouts: int | None, ingress_replicas: int
) -> list[Bound]:
    """Half of the room for bodies, so that no key keeps all others out, and an equal share of the quota.

    A single body may be larger. All shares together are at most the quota, or 1 each where it is less.
    """
    most = settings.max_body_bytes
    bounds = [Bound("body_bytes", most // KEYS_BESIDE, "admission.max_body_bytes (half for one key)", most)]
    if max_rollouts is not None:
        setting = f"max_rollouts of the key {key}"
        if ingress_replicas > 1:
            setting += f" ({max_rollouts}, shared by {ingress_replicas} ingress replicas)"
        bounds.append(Bound("rollouts", max(max_rollouts // ingress_replicas, 1), setting))
    return bounds


@contextmanager
def _refusals(hold: _Hold, fields: Mapping[Resource, str]) -> Iterator[None]:
    """Raises `RequestProblem` for `NoRoom`: 429 for later, 413 or 422 for never."""
    try:
        yield
    except NoRoom as error:
        bound, noun = error.bound, NOUNS[error.bound.resource]
        if error.in_flight is not None:
            wait_s = random.randint(*RETRY_AFTER_S)
            message = f"{error.in_flight} {noun} are in flight here and {bound.setting} allows {bound.most}"
            raise refused_for_now(hold.used_up, f"{message}; try again in {wait_s} s", wait_s) from error
        most = max(bound.most, bound.most_of_one)
        message = (
            f"{error.wanted} {noun} are more than {bound.setting} allows, which is {most}; {ADVICE[bound.resource]}"
        )
        if bound.resource == "body_bytes":
            raise body_too_large(message) from error
        raise invalid_request(FieldProblem(field=fields[bound.resource], message=message)) from error
