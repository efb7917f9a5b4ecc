"""Which sessions are dropped, and which calls are refused."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.sessions.session_table import SessionRefused, SessionTable
from rollout_client.contract.sessions import SessionLimits

MOST_SESSIONS = 3
MOST_BYTES = 100


def table_of(*names: str, idle_s: float = 10.0) -> SessionTable:
    """Sessions that were opened one second after the other, from second 0 on."""
    table = SessionTable(MOST_SESSIONS, MOST_BYTES)
    for second, name in enumerate(names):
        assert table.open(name, SessionLimits(idle_s=idle_s), second) == []
    return table


def end_call(table: SessionTable, name: str, now: float, tokens: int, size_bytes: int) -> list[str]:
    table.end_call(name, now)
    return table.note_record(name, tokens, size_bytes)


def test_a_session_expires_when_it_was_idle_for_its_time() -> None:
    table = table_of("a", "b")
    assert table.drop_expired(9.9) == []
    assert table.drop_expired(10.0) == ["a"]
    assert table.get("b").expires_at == 11.0
    table.use("b", 10.5)
    assert table.drop_expired(20.4) == []
    assert table.drop_expired(20.5) == ["b"]


def test_a_session_with_a_call_in_flight_does_not_expire() -> None:
    table = table_of("a")
    table.begin_call("a", 1)
    assert table.get("a").expires_at is None
    assert table.drop_expired(1000) == []
    end_call(table, "a", 1000, 5, 10)
    assert table.drop_expired(1009) == []
    assert table.drop_expired(1010) == ["a"]
    assert table.size_bytes == 0


def test_the_session_that_is_idle_for_the_longest_time_makes_room_for_another() -> None:
    table = table_of("a", "b", "c")
    table.begin_call("a", 3)
    table.use("b", 4)
    assert table.open("d", SessionLimits(), 5) == ["c"]
    for name in ("b", "d"):
        table.begin_call(name, 6)
    with pytest.raises(SessionRefused, match="All 3 sessions have calls in flight") as refused:
        table.open("e", SessionLimits(), 7)
    assert refused.value.reason == "max_sessions"


def test_room_is_made_by_the_namespace_that_keeps_the_most() -> None:
    table = SessionTable(MOST_SESSIONS, MOST_BYTES)
    table.open("mine", SessionLimits(), 0, namespace="me")
    for second, name in enumerate(("a", "b"), 1):
        table.open(name, SessionLimits(), second, namespace="them")
    assert table.open("c", SessionLimits(), 3, namespace="them") == ["a"]
    assert table.note_record("mine", 1, 60) == []
    assert table.note_record("b", 1, 30) == []
    assert table.note_record("c", 1, 20) == ["mine"]


def test_what_a_session_is_opened_with_counts_as_a_part_of_its_record() -> None:
    table = SessionTable(MOST_SESSIONS, MOST_BYTES)
    assert table.open("a", SessionLimits(), 0, size_bytes=60) == []
    assert table.open("b", SessionLimits(), 1, size_bytes=60) == ["a"]
    assert table.size_bytes == 60


def test_records_that_are_too_large_together_cost_the_longest_idle_ones() -> None:
    table = table_of("a", "b", "c")
    for name in ("a", "b", "c"):
        table.begin_call(name, 3)
    assert end_call(table, "b", 4, 1, 40) == []
    assert end_call(table, "c", 5, 1, 40) == []
    assert end_call(table, "a", 6, 1, 40) == ["b"]
    assert (table.size_bytes, len(table), "b" in table) == (80, 2, False)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_calls": 1}, "max_calls"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_calls_in_flight": 1}, "max_calls_in_flight"),
    ],
)
def test_a_call_beyond_a_limit_is_refused(limits: dict[str, int], reason: str) -> None:
    table = SessionTable(MOST_SESSIONS, MOST_BYTES)
    table.open("a", SessionLimits.model_validate(limits), 0)
    table.begin_call("a", 0)
    if reason != "max_calls_in_flight":
        end_call(table, "a", 0, 5, 1)
    with pytest.raises(SessionRefused, match=f"limits.{reason}: [15] of [15]") as refused:
        table.begin_call("a", 1)
    assert (refused.value.reason, table.get("a").calls) == (reason, 1)


def test_after_its_deadline_a_session_takes_no_call_and_names_those_to_abort() -> None:
    table = SessionTable(MOST_SESSIONS, MOST_BYTES)
    table.open("a", SessionLimits(), 0, deadline_s=5)
    table.begin_call("a", 4)
    assert (table.beyond_deadline(4.9), table.beyond_deadline(5)) == ([], ["a"])
    with pytest.raises(SessionRefused, match="deadline of session 'a' is over"):
        table.begin_call("a", 5)
    end_call(table, "a", 6, 1, 1)
    assert table.beyond_deadline(6) == []


def test_an_ended_session_takes_no_call_and_keeps_its_record_until_it_expires() -> None:
    table = table_of("a")
    table.end("a", 1)
    with pytest.raises(SessionRefused, match="'a' has ended"):
        table.begin_call("a", 2)
    assert "a" in table
    assert table.drop("a") == "a"
    with pytest.raises(SessionRefused, match="no session 'a'"):
        table.get("a")


class AnySessions(RuleBasedStateMachine):
    """Against a list of what was done."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SessionTable(MOST_SESSIONS, MOST_BYTES)
        self.now = 0.0
        self.names = 0
        self.used_at: dict[str, float] = {}
        self.in_flight: dict[str, int] = {}
        self.sizes: dict[str, int] = {}

    def _dropped(self, names: list[str], least_bytes: int = 0) -> None:
        """Each was idle for the longest time of those that have so many bytes."""
        for name in names:
            idle = [one for one in self.used_at if not self.in_flight[one] and self.sizes[one] >= least_bytes]
            assert name == min(idle, key=self.used_at.__getitem__)
            self._forget(name)

    def _forget(self, name: str) -> None:
        for known in (self.used_at, self.in_flight, self.sizes):
            known.pop(name)

    @rule()
    def open(self) -> None:
        self.now += 1
        self.names += 1
        name = str(self.names)
        try:
            self._dropped(self.table.open(name, SessionLimits(idle_s=10), self.now))
        except SessionRefused:
            assert len(self.in_flight) == MOST_SESSIONS
            assert all(self.in_flight.values())
            return
        self.used_at[name], self.in_flight[name], self.sizes[name] = self.now, 0, 0

    @precondition(lambda self: self.used_at)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.now += 1
        name = data.draw(st.sampled_from(sorted(self.used_at)))
        self.table.begin_call(name, self.now)
        self.used_at[name] = self.now
        self.in_flight[name] += 1

    @precondition(lambda self: any(self.in_flight.values()))
    @rule(data=st.data(), grown=st.integers(0, 60))
    def finish(self, data: st.DataObject, grown: int) -> None:
        self.now += 1
        name = data.draw(st.sampled_from(sorted(one for one, count in self.in_flight.items() if count)))
        self.used_at[name] = self.now
        self.in_flight[name] -= 1
        self.sizes[name] += grown
        self._dropped(end_call(self.table, name, self.now, 1, self.sizes[name]), least_bytes=1)

    @rule(seconds=st.integers(1, 12))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        expired = {
            name for name, used_at in self.used_at.items() if not self.in_flight[name] and self.now >= used_at + 10
        }
        dropped = self.table.drop_expired(self.now)
        assert set(dropped) == expired
        self._dropped(dropped)

    @invariant()
    def holds_what_is_there(self) -> None:
        assert len(self.table) == len(self.used_at) <= MOST_SESSIONS
        assert self.table.size_bytes == sum(self.sizes.values())
        idle = sum(self.sizes[name] for name, count in self.in_flight.items() if not count)
        assert self.table.size_bytes <= MOST_BYTES or idle == 0


test_any_sessions = AnySessions.TestCase
