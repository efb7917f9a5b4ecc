"""Capacity of one ingress replica for requests in flight. A state machine without I/O: the caller passes the time in.

Guarantees: what all reservations hold together never exceeds a bound, except that a single reservation may exceed the
replica's share of a bound of the whole service (never the bound itself), or have up to `most_of_one` of its bound; a
refused growth changes nothing; when all reservations are closed, nothing is held.

A request is *in flight* from its headers until the last byte of its response. `tokens` are those that it asks for: an
upper bound of what its rollouts can hold at their ends.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

Resource = Literal["rollouts", "tokens", "body_bytes"]
RESOURCES: tuple[Resource, ...] = ("body_bytes", "rollouts", "tokens")
RATE_WINDOW_S = 60.0
"""Window over which the rate of freed capacity is measured."""
SHORTEST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
"""The client that waits longest asks twice a minute: often enough to find capacity that got free unexpectedly."""
UNKNOWN_WAIT_S = 5.0
"""Default until a request has finished."""
SPREAD = 0.25
"""Largest random part that is added to a wait, so that callers that were refused together return at different times."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """Amounts that one request, or all of them together, hold."""

    rollouts: int = 0
    tokens: int = 0
    body_bytes: int = 0

    def of(self, resource: Resource) -> int:
        amount: int = getattr(self, resource)
        return amount


NOTHING = Amounts()


@dataclass(frozen=True, slots=True)
class Bound:
    """The most of one resource; `setting` is its name in the config."""

    most: int
    setting: str
    most_of_one: int = 0
    """A single request may have so much while it is the only one, if that is more than `most`."""


@dataclass(slots=True)
class Reservation:
    """Amounts that one request holds."""

    held: Amounts = NOTHING


class BoundExceeded(Exception):
    """The request wants more than a bound allows a single request: it can never be admitted."""

    def __init__(self, resource: Resource, wanted: int, bound: Bound) -> None:
        super().__init__(resource)
        self.resource = resource
        self.wanted = wanted
        self.bound = bound


class CapacityExhausted(Exception):
    """The request can be admitted later: `retry_after_s` is the estimate of when."""

    def __init__(self, resource: Resource, in_flight: int, bound: Bound, retry_after_s: float) -> None:
        super().__init__(resource)
        self.resource = resource
        self.in_flight = in_flight
        self.bound = bound
        self.retry_after_s = retry_after_s


class Capacity:
    """Reservations against the bounds of a replica and of the service.

    Args:
        of_replica: the bounds of this ingress replica. A resource without a bound is missing.
        of_service: the bounds of the whole service, of which each ingress replica has an equal share.
        draw: returns a random number in [0, 1).
    """

    def __init__(
        self,
        of_replica: Mapping[Resource, Bound],
        of_service: Mapping[Resource, Bound],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._of_replica = of_replica
        self._of_service = of_service
        self._draw = draw
        self._in_flight = Amounts()
        self._ended: deque[tuple[float, Amounts]] = deque()
        """End of each recent request, with the amounts that it held."""
        self._promised_until: dict[Resource, float] = {}
        """Time at which waiting callers will have used up the capacity that gets free, by resource."""

    @property
    def in_flight(self) -> Amounts:
        return self._in_flight

    def set_bounds_of_replica(self, bounds: Mapping[Resource, Bound]) -> None:
        """Replaces the bounds for reservations that grow from now on."""
        self._of_replica = bounds

    def grow(self, reservation: Reservation, wanted: Amounts, ingress_replicas: int, now: float) -> None:
        """Raises the reservation to `wanted`; amounts that it holds already do not shrink.

        Raises:
            BoundExceeded: `wanted` exceeds a bound by itself.
            CapacityExhausted: others hold too much.
        """
        held = reservation.held
        grown = Amounts(**{resource: max(held.of(resource), wanted.of(resource)) for resource in RESOURCES})
        self.check(grown, ingress_replicas, now, held)
        self._add(held, sign=-1)
        self._add(grown, sign=1)
        reservation.held = grown

    def check(self, wanted: Amounts, ingress_replicas: int, now: float, held: Amounts = NOTHING) -> None:
        """Raises what `grow` would raise for a request that holds `held`, and reserves nothing."""
        for resource in RESOURCES:
            if wanted.of(resource) > held.of(resource):
                self._check(resource, held.of(resource), wanted.of(resource), ingress_replicas, now)

    def close(self, reservation: Reservation, now: float) -> None:
        """Releases the reservation; idempotent."""
        if reservation.held == NOTHING:
            return
        self._add(reservation.held, sign=-1)
        self._ended.append((now, reservation.held))
        self._forget_old(now)
        reservation.held = NOTHING

    def _check(self, resource: Resource, held: int, wanted: int, ingress_replicas: int, now: float) -> None:
        bounds = [bounds[resource] for bounds in (self._of_replica, self._of_service) if resource in bounds]
        for bound in bounds:
            if wanted > max(bound.most, bound.most_of_one):
                raise BoundExceeded(resource, wanted, bound)
        others = self._in_flight.of(resource) - held
        for bound in bounds:
            share = bound.most
            if bound is self._of_service.get(resource):
                share = -(-bound.most // ingress_replicas)
            if others and others + wanted > share:
                wait_s = self._wait_s(resource, others + wanted - share, wanted, now)
                raise CapacityExhausted(resource, self._in_flight.of(resource), replace(bound, most=share), wait_s)

    def _wait_s(self, resource: Resource, shortage: int, wanted: int, now: float) -> float:
        """Time until `shortage` is free, behind the callers that were told to wait earlier."""
        self._forget_old(now)
        freed = sum(amounts.of(resource) for _, amounts in self._ended)
        if not freed:
            return UNKNOWN_WAIT_S * (1 + SPREAD * self._draw())
        per_second = freed / max(now - self._ended[0][0], SHORTEST_WAIT_S)
        # A request that is refused at its headers has not said yet how much it wants.
        expected = max(wanted, freed // len(self._ended))
        after_others = self._promised_until.get(resource, now) + expected / per_second
        until = min(max(now + shortage / per_second, after_others), now + LONGEST_WAIT_S)
        self._promised_until[resource] = until
        return max(until - now, SHORTEST_WAIT_S) * (1 + SPREAD * self._draw())

    def _forget_old(self, now: float) -> None:
        while self._ended and self._ended[0][0] < now - RATE_WINDOW_S:
            self._ended.popleft()

    def _add(self, amounts: Amounts, sign: Literal[1, -1]) -> None:
        total = self._in_flight
        self._in_flight = Amounts(**{name: total.of(name) + sign * amounts.of(name) for name in RESOURCES})
