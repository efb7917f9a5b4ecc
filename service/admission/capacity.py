"""Capacity of one ingress replica for requests in flight. A state machine without I/O and without a clock.

Guarantees: what all reservations hold together never exceeds a bound, except that a reservation that is alone may have
up to `most_of_one` of it; a refused growth changes nothing; when all reservations are closed, nothing is held.

A request is *in flight* from its headers until the last byte of its response. `tokens` are those that it asks for: an
upper bound of what its rollouts can hold at their ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Resource = Literal["rollouts", "tokens", "body_bytes"]
RESOURCES: tuple[Resource, ...] = ("body_bytes", "rollouts", "tokens")


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

    resource: Resource
    most: int
    setting: str
    most_of_one: int = 0
    """A single request may have so much while it is the only one, if that is more than `most`."""


@dataclass(slots=True)
class Reservation:
    """Amounts that one request holds."""

    held: Amounts = NOTHING


class NoRoom(Exception):
    """A request wants more than a bound allows."""

    def __init__(self, bound: Bound, wanted: int, in_flight: int | None = None) -> None:
        """`in_flight` is the amount that all requests hold; `None` if the request exceeds the bound by itself: it can
        never be admitted."""
        super().__init__(bound.resource)
        self.bound = bound
        self.wanted = wanted
        self.in_flight = in_flight


class Capacity:
    """Reservations against `bounds`. New bounds hold for reservations that grow from then on."""

    def __init__(self, bounds: Sequence[Bound] = ()) -> None:
        self.bounds = bounds
        self.in_flight = NOTHING

    def grow(self, reservation: Reservation, wanted: Amounts) -> None:
        """Raises the reservation to `wanted`; amounts that it holds already do not shrink.

        Raises:
            NoRoom: `wanted` exceeds a bound by itself, or others hold too much.
        """
        held = reservation.held
        grown = Amounts(**{resource: max(held.of(resource), wanted.of(resource)) for resource in RESOURCES})
        self.check(grown, held)
        self._replace(held, grown)
        reservation.held = grown

    def check(self, wanted: Amounts, held: Amounts = NOTHING) -> None:
        """Raises what `grow` would raise for a request that holds `held`, and reserves nothing."""
        growing = [bound for bound in self.bounds if wanted.of(bound.resource) > held.of(bound.resource)]
        for bound in growing:
            if wanted.of(bound.resource) > max(bound.most, bound.most_of_one):
                raise NoRoom(bound, wanted.of(bound.resource))
        for bound in growing:
            in_flight = self.in_flight.of(bound.resource)
            others = in_flight - held.of(bound.resource)
            if others and others + wanted.of(bound.resource) > bound.most:
                raise NoRoom(bound, wanted.of(bound.resource), in_flight)

    def close(self, reservation: Reservation) -> None:
        """Releases the reservation; idempotent."""
        self._replace(reservation.held, NOTHING)
        reservation.held = NOTHING

    def _replace(self, held: Amounts, by: Amounts) -> None:
        total = self.in_flight
        self.in_flight = Amounts(**{name: total.of(name) - held.of(name) + by.of(name) for name in RESOURCES})
