"""What may be in flight: no bound is exceeded, and nothing stays reserved."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from service.admission.capacity import RESOURCES, Amounts, Bound, Capacity, NoRoom, Reservation

amounts = st.builds(Amounts, st.integers(0, 12), st.integers(0, 120), st.integers(0, 60))


class Requests(RuleBasedStateMachine):
    """Requests that come, grow and end in any order."""

    @initialize(most=amounts, share=st.integers(1, 20), of_one=st.integers(0, 20))
    def set_up(self, most: Amounts, share: int, of_one: int) -> None:
        self.most = Amounts(most.rollouts + 1, most.tokens + 1, most.body_bytes + 1)
        self.share = Bound("rollouts", share, "share", of_one)
        self.capacity = Capacity([*(Bound(each, self.most.of(each), "most") for each in RESOURCES), self.share])
        self.reservations: list[Reservation] = []

    @rule(wanted=amounts)
    def open(self, wanted: Amounts) -> None:
        reservation = Reservation()
        self.reservations.append(reservation)
        self._grow(reservation, wanted)

    @rule(wanted=amounts, which=st.integers(0))
    def grow(self, wanted: Amounts, which: int) -> None:
        if self.reservations:
            self._grow(self.reservations[which % len(self.reservations)], wanted)

    @rule(which=st.integers(0), times=st.integers(1, 2))
    def close(self, which: int, times: int) -> None:
        if self.reservations:
            reservation = self.reservations.pop(which % len(self.reservations))
            for _ in range(times):
                self.capacity.close(reservation)

    def _grow(self, reservation: Reservation, wanted: Amounts) -> None:
        before, total = reservation.held, self.capacity.in_flight
        try:
            self.capacity.grow(reservation, wanted)
        except NoRoom:
            assert (reservation.held, self.capacity.in_flight) == (before, total)
        else:
            assert all(reservation.held.of(each) == max(before.of(each), wanted.of(each)) for each in RESOURCES)

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
        alone = max(self.share.most, self.share.most_of_one)
        assert sum(rollouts) <= (self.share.most if len(rollouts) > 1 else alone)


TestRequests = Requests.TestCase
