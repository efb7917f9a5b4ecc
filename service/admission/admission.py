"""Decides which `POST /rollout` and `/score` may come in, and holds what each reserves until its response is sent."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock

from rollout_client.contract import RolloutRequest
from rollout_client.problem_contract import FieldProblem
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
from service.responses.problems import RequestProblem, body_too_large, invalid_request, overloaded
from service.settings import AdmissionBounds, AdmissionSettings

LEAST_WANTED = Amounts(rollouts=1, tokens=1)
"""What a request wants at least, before its body is read."""
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


class Admission:
    """The admission of one ingress replica. Threads may share it: a body is decompressed in a thread."""

    def __init__(
        self, settings: AdmissionSettings, max_model_len: int, ingress_replicas: Callable[[], int] = lambda: 1
    ) -> None:
        """
        Args:
            max_model_len: tokens that a rollout has at most, where its request does not say.
            ingress_replicas: how many replicas share the bounds of the service.
        """
        self.settings = settings
        self._capacity = Capacity(
            bounds_of(settings.replica, "admission.replica"), bounds_of(settings.service, "admission.service")
        )
        self._max_model_len = max_model_len
        self._ingress_replicas = ingress_replicas
        self._lock = Lock()

    @property
    def in_flight(self) -> Amounts:
        return self._capacity.in_flight

    @contextmanager
    def admitted(self, body_bytes: int) -> Iterator["AdmittedRequest"]:
        """Admits a request by its headers, before its body is read; frees all that it holds when the block ends.

        Args:
            body_bytes: the size that its headers give, 0 where they give none.

        Raises:
            RequestProblem: 429 with `Retry-After` if there is no room now, 413 if the body can never be admitted.
        """
        reservation = Reservation()
        try:
            self.grow(reservation, replace(LEAST_WANTED, body_bytes=body_bytes))
            yield AdmittedRequest(self, reservation)
        finally:
            with self._lock:
                self._capacity.close(reservation, time.monotonic())

    def amounts_of(self, request: RolloutRequest) -> Amounts:
        rollouts = request.sample_count * request.num_generations
        most_tokens = request.max_seq_len or self._max_model_len
        if request.sampling.max_new_tokens is not None:
            most_tokens = min(most_tokens, request.max_rollout_turns * request.sampling.max_new_tokens)
        return Amounts(rollouts, rollouts * most_tokens)

    def grow(self, reservation: Reservation, wanted: Amounts, fields: Mapping[Resource, str] = FIELDS) -> None:
        """Raises `RequestProblem`: 429 for later, 413 or 422 for never; `fields` are those that ask for too much."""
        try:
            with self._lock:
                self._capacity.grow(reservation, wanted, self._ingress_replicas(), time.monotonic())
        except BoundExceeded as error:
            raise never_admitted(error, fields) from error
        except CapacityExhausted as error:
            raise not_admitted_now(error) from error


class AdmittedRequest:
    """A request that was admitted by its headers; reading it tells what it wants beyond that."""

    def __init__(self, admission: Admission, reservation: Reservation) -> None:
        self._admission = admission
        self._reservation = reservation

    def hold_body(self, size_bytes: int) -> None:
        """Raises `RequestProblem` (429, 413) if the body, of which so much was read, cannot be held."""
        if size_bytes > self._reservation.held.body_bytes:
            self._admission.grow(self._reservation, replace(self._reservation.held, body_bytes=size_bytes))

    def hold_rollouts(self, request: RolloutRequest) -> None:
        """Raises `RequestProblem` (429, 422) if the rollouts of the parsed request cannot be held."""
        self._admission.grow(self._reservation, self._admission.amounts_of(request))

    def hold_sequences(self, sequences: int, tokens: int) -> None:
        """Raises `RequestProblem` (429, 422) if so many sequences with so many tokens cannot be held."""
        self._admission.grow(self._reservation, Amounts(sequences, tokens), SCORE_FIELDS)


def bounds_of(settings: AdmissionBounds, name: str) -> dict[Resource, Bound]:
    given = {resource: getattr(settings, f"max_{resource}") for resource in RESOURCES}
    return {resource: Bound(most, f"{name}.max_{resource}") for resource, most in given.items() if most is not None}


def never_admitted(error: BoundExceeded, fields: Mapping[Resource, str]) -> RequestProblem:
    message = (
        f"{error.wanted} {NOUNS[error.resource]} are more than {error.bound.setting} allows, which is "
        f"{error.bound.most}; {ADVICE[error.resource]}"
    )
    if error.resource == "body_bytes":
        return body_too_large(message)
    return invalid_request(FieldProblem(field=fields[error.resource], message=message))


def not_admitted_now(error: CapacityExhausted) -> RequestProblem:
    retry_after_s = math.ceil(error.retry_after_s)
    return overloaded(
        f"{error.in_flight} {NOUNS[error.resource]} are in flight here and {error.bound.setting} allows "
        f"{error.bound.most}; try again in {retry_after_s} s",
        retry_after_s,
    )
