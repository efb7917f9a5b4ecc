"""What may be in flight: no bound is exceeded, nothing stays reserved, and a refused request is told when to come."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from service.admission.capacity import (
    LONGEST_WAIT_S,
    RATE_WINDOW_S,
    RESOURCES,
    SHORTEST_WAIT_S,
    SPREAD,
    UNKNOWN_WAIT_S,
    Amounts,
    Bound,
    BoundExceeded,
    Capacity,
    CapacityExhausted,
    Reservation,
    Resource,
)


def bounds(**most: int) -> dict[Resource, Bound]:
    return {resource: Bound(most[resource], f"most {resource}") for resource in RESOURCES if resource in most}


def capacity_of(rollouts: int, of_service: int | None = None) -> Capacity:
    service = {} if of_service is None else bounds(rollouts=of_service)
    return Capacity(bounds(rollouts=rollouts), service, draw=lambda: 0.0)


def admitted(capacity: Capacity, rollouts: int, now: float = 0.0, replicas: int = 1) -> Reservation:
    reservation = Reservation()
    capacity.grow(reservation, Amounts(rollouts), replicas, now)
    return reservation


def refused(capacity: Capacity, rollouts: int, now: float = 0.0, replicas: int = 1) -> CapacityExhausted:
    with pytest.raises(CapacityExhausted) as raised:
        admitted(capacity, rollouts, now, replicas)
    return raised.value


amounts = st.builds(Amounts, st.integers(0, 12), st.integers(0, 120), st.integers(0, 60))


class Requests(RuleBasedStateMachine):
    """Requests that come, grow and end in any order."""

    @initialize(most=amounts, replicas=st.integers(1, 4), service=st.integers(1, 20))
    def set_up(self, most: Amounts, replicas: int, service: int) -> None:
        self.most = Amounts(most.rollouts + 1, most.tokens + 1, most.body_bytes + 1)
        of_replica = bounds(**{resource: self.most.of(resource) for resource in RESOURCES})
        self.service = service
        self.replicas = replicas
        self.capacity = Capacity(of_replica, bounds(rollouts=service))
        self.reservations: list[Reservation] = []
        self.now = 0.0

    @rule(wanted=amounts)
    def open(self, wanted: Amounts) -> None:
        reservation = Reservation()
        self.reservations.append(reservation)
        self._grow(reservation, wanted)

    @rule(wanted=amounts, which=st.integers(0))
    def grow(self, wanted: Amounts, which: int) -> None:
        if self.reservations:
            self._grow(self.reservations[which % len(self.reservations)], wanted)

    @rule(which=st.integers(0), times=st.integers(1, 2), seconds=st.floats(0, 100))
    def close(self, which: int, times: int, seconds: float) -> None:
        self.now += seconds
        if self.reservations:
            reservation = self.reservations.pop(which % len(self.reservations))
            for _ in range(times):
                self.capacity.close(reservation, self.now)

    def _grow(self, reservation: Reservation, wanted: Amounts) -> None:
        before, total = reservation.held, self.capacity.in_flight
        try:
            self.capacity.grow(reservation, wanted, self.replicas, self.now)
        except (BoundExceeded, CapacityExhausted) as refusal:
            assert (reservation.held, self.capacity.in_flight) == (before, total)
            wait_s = getattr(refusal, "retry_after_s", SHORTEST_WAIT_S)
            assert SHORTEST_WAIT_S <= wait_s <= LONGEST_WAIT_S * (1 + SPREAD)
        else:
            assert all(reservation.held.of(each) >= wanted.of(each) for each in RESOURCES)

    @invariant()
    def what_is_in_flight_is_what_the_reservations_hold(self) -> None:
        for resource in RESOURCES:
            held = [reservation.held.of(resource) for reservation in self.reservations]
            assert self.capacity.in_flight.of(resource) == sum(held)

    @invariant()
    def no_bound_is_exceeded(self) -> None:
        for resource in RESOURCES:
            assert self.capacity.in_flight.of(resource) <= self.most.of(resource)
        rollouts = [reservation.held.rollouts for reservation in self.reservations if reservation.held.rollouts]
        if len(rollouts) > 1:
            assert sum(rollouts) <= max(-(-self.service // self.replicas), max(rollouts))
        assert sum(rollouts) <= self.service or len(rollouts) == 0


TestRequests = Requests.TestCase


def test_a_request_is_refused_while_others_hold_too_much_and_admitted_when_they_have_ended() -> None:
    capacity = capacity_of(rollouts=10)
    first = admitted(capacity, 7)
    refusal = refused(capacity, 4)
    assert (refusal.resource, refusal.in_flight, refusal.bound) == ("rollouts", 7, Bound(10, "most rollouts"))
    admitted(capacity, 3)
    capacity.close(first, 1.0)
    admitted(capacity, 7)
    assert capacity.in_flight == Amounts(rollouts=10)


def test_a_request_that_exceeds_a_bound_by_itself_is_refused_for_good() -> None:
    for capacity, exceeded in (
        (capacity_of(10), Bound(10, "most rollouts")),
        (capacity_of(100, of_service=10), Bound(10, "most rollouts")),
    ):
        with pytest.raises(BoundExceeded) as raised:
            admitted(capacity, 11)
        assert (raised.value.resource, raised.value.wanted, raised.value.bound) == ("rollouts", 11, exceeded)


def test_each_ingress_replica_has_its_share_of_the_services_bounds() -> None:
    capacity = capacity_of(100, of_service=10)
    admitted(capacity, 3, replicas=3)
    assert refused(capacity, 2, replicas=3).bound.most == 4
    admitted(capacity, 1, replicas=3)
    assert refused(capacity, 1, replicas=3).bound.most == 4
    # Now there are fewer replicas.
    admitted(capacity, 1, replicas=2)


def test_a_single_request_may_be_larger_than_the_share_and_then_no_other_one_is_admitted() -> None:
    capacity = capacity_of(100, of_service=10)
    large = admitted(capacity, 10, replicas=3)
    refused(capacity, 1, replicas=3)
    capacity.close(large, 0.0)
    admitted(capacity, 1, replicas=3)
    refused(capacity, 10, replicas=3)


def test_a_reservation_does_not_shrink() -> None:
    capacity = Capacity({}, {})
    reservation = Reservation()
    capacity.grow(reservation, Amounts(rollouts=1, tokens=1, body_bytes=100), 1, 0.0)
    capacity.grow(reservation, Amounts(rollouts=8, tokens=80), 1, 0.0)
    assert capacity.in_flight == reservation.held == Amounts(8, 80, 100)


# How long a refused request waits


def after_releases(rollouts: int, count: int, every_s: float) -> Capacity:
    """Full with 100 rollouts, after `count` requests of `rollouts` rollouts have ended, one every `every_s`."""
    capacity = capacity_of(rollouts=100)
    for number in range(count):
        capacity.close(admitted(capacity, rollouts), number * every_s)
    admitted(capacity, 100)
    return capacity


def test_while_nothing_has_ended_a_fixed_time_is_waited() -> None:
    capacity = capacity_of(1)
    admitted(capacity, 1)
    assert refused(capacity, 1).retry_after_s == UNKNOWN_WAIT_S


def test_the_wait_is_the_shortage_divided_by_the_rate_at_which_rollouts_end() -> None:
    # 50 rollouts in 10 s, and 20 are missing.
    capacity = after_releases(5, count=10, every_s=1.0)
    assert refused(capacity, 20, now=10.0).retry_after_s == pytest.approx(20 / 5)


def test_those_that_wait_are_told_to_come_one_after_the_other() -> None:
    capacity = after_releases(5, count=10, every_s=1.0)
    waits = [refused(capacity, 20, now=10.0).retry_after_s for _ in range(9)]
    assert waits == pytest.approx([4, 8, 12, 16, 20, 24, 28, LONGEST_WAIT_S, LONGEST_WAIT_S])


def test_a_request_that_has_not_said_what_it_wants_counts_as_much_as_those_that_ended() -> None:
    capacity = after_releases(10, count=10, every_s=1.0)
    assert [refused(capacity, 1, now=10.0).retry_after_s for _ in range(3)] == pytest.approx([1, 2, 3])


def test_what_ended_long_ago_says_nothing() -> None:
    capacity = after_releases(5, count=10, every_s=1.0)
    assert refused(capacity, 1, now=9.0 + RATE_WINDOW_S + 1).retry_after_s == UNKNOWN_WAIT_S


def test_what_ended_long_ago_is_forgotten_although_nothing_is_refused() -> None:
    capacity = capacity_of(rollouts=1)
    tracemalloc.start()
    try:
        for number in range(20_000):
            capacity.close(admitted(capacity, 1), float(number))
            if number == 1000:
                before, _ = tracemalloc.get_traced_memory()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 10_000


@given(draw=st.floats(0, 1, exclude_max=True))
def test_a_wait_is_spread_at_random(draw: float) -> None:
    capacity = Capacity(bounds(rollouts=1), {}, draw=lambda: draw)
    admitted(capacity, 1)
    assert refused(capacity, 1).retry_after_s == pytest.approx(UNKNOWN_WAIT_S * (1 + SPREAD * draw))
