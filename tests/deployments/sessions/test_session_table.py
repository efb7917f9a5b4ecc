"""Which sessions are dropped, and which calls are refused."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.sessions.records import OpenSession, SessionLimitReached, SessionUnknown
from deployments.sessions.session_table import SESSION_BYTES, KeptSession, SessionsSettings, SessionTable
from rollout_client.contract.sessions import SessionLimits, SessionRequest

MOST_SESSIONS = 3
MOST_BYTES = 100
"""Beside what `MOST_SESSIONS` sessions take without a record."""


class Sessions:
    """A table whose sessions are named."""

    def __init__(self, *names: str) -> None:
        """With sessions that were opened one second after the other, from second 0 on, and expire after 10 seconds."""
        settings = SessionsSettings(max_bytes=MOST_SESSIONS * SESSION_BYTES + MOST_BYTES, lease_s=1e9)
        self.table = SessionTable(settings, (), 0)
        self._calls = 0
        for second, name in enumerate(names):
            assert self.open(name, second) == set()

    def open(
        self,
        name: str,
        now: float,
        namespace: str = "",
        size_bytes: int = 0,
        limits: dict[str, float] | None = None,
    ) -> set[str]:
        """Returns the sessions that were dropped, as all changes here do."""
        given = SessionLimits.model_validate({"idle_s": 10} | (limits or {}))
        opened = OpenSession(name, namespace, "", "http://service", SessionRequest(limits=given))
        before = set(self.table.sessions)
        self.table.open(opened, size_bytes, now)
        return before - set(self.table.sessions)

    def __getitem__(self, name: str) -> KeptSession:
        return self.table.sessions[name]

    def begin_call(self, name: str, now: float) -> None:
        self._calls += 1
        self.table.begin_call(self[name], str(self._calls), now)

    def end_call(self, name: str, now: float, tokens: int, size_bytes: int) -> set[str]:
        """Ends the call that began first."""
        kept = self[name]
        self.table.end_call(name, next(iter(kept.in_flight)), now)
        return self.grow(kept, tokens, size_bytes)

    def grow(self, kept: KeptSession, tokens: int, size_bytes: int) -> set[str]:
        """Its record has so many tokens and bytes."""
        assert kept.read is not None
        kept.read.record.total_tokens, kept.read.record.size_bytes = tokens, size_bytes
        before = set(self.table.sessions)
        self.table.note_record(kept)
        return before - set(self.table.sessions)

    def pass_time(self, now: float) -> set[str]:
        before = set(self.table.sessions)
        self.table.pass_time(now)
        return before - set(self.table.sessions)


def test_room_is_made_by_the_namespace_that_keeps_the_most() -> None:
    sessions = Sessions()
    sessions.open("mine", 0, namespace="me")
    for second, name in enumerate(("a", "b"), 1):
        sessions.open(name, second, namespace="them")
    assert sessions.open("c", 3, namespace="them") == {"a"}
    assert sessions.grow(sessions["mine"], 1, 60) == set()
    assert sessions.grow(sessions["c"], 1, 45) == {"b"}
    assert sessions.grow(sessions["mine"], 1, SESSION_BYTES + 50) == set()
    assert sessions.open("d", 4, namespace="them") == {"mine"}


def test_what_a_session_is_opened_with_counts_as_a_part_of_its_record() -> None:
    sessions = Sessions()
    assert sessions.open("a", 0, size_bytes=60) == set()
    assert sessions.open("b", 1, size_bytes=2 * SESSION_BYTES) == {"a"}
    assert sessions.table.size_bytes == 3 * SESSION_BYTES


def test_records_that_are_too_large_together_cost_the_longest_idle_ones() -> None:
    sessions = Sessions("a", "b", "c")
    b = sessions["b"]
    for name in ("a", "b", "c"):
        sessions.begin_call(name, 3)
    assert sessions.end_call("b", 4, 1, 40) == set()
    assert sessions.end_call("c", 5, 1, 40) == set()
    assert sessions.end_call("a", 6, 1, 40) == {"b"}
    assert sessions.grow(b, 1, 1000) == set()
    assert (sessions.table.size_bytes, list(sessions.table.sessions)) == (2 * SESSION_BYTES + 80, ["a", "c"])
    with pytest.raises(SessionUnknown):
        sessions.table.begin_call(b, "b-9", 7)


@pytest.mark.parametrize("limits", [{"max_calls": 1}, {"max_tokens": 5}, {"max_calls_in_flight": 1}])
def test_a_call_beyond_a_limit_is_refused(limits: dict[str, float]) -> None:
    [reason] = limits
    sessions = Sessions()
    sessions.open("a", 0, limits=limits)
    sessions.begin_call("a", 0)
    if reason == "max_tokens":
        sessions.end_call("a", 0, 5, 1)
    with pytest.raises(SessionLimitReached, match=rf"^limits\.{reason}: .* reached limits\.{reason}: [15] of [15]"):
        sessions.begin_call("a", 1)


class AnySessions(RuleBasedStateMachine):
    """Against a list of what was done."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions = Sessions()
        self.table = self.sessions.table
        self.now = 0.0
        self.names = 0
        self.used_at: dict[str, float] = {}
        self.in_flight: dict[str, int] = {}
        self.sizes: dict[str, int] = {}

    def _dropped(self, names: set[str]) -> None:
        """Each was idle for the longest time."""
        for name in sorted(names, key=self.used_at.__getitem__):
            idle = [one for one in self.used_at if not self.in_flight[one]]
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
            self._dropped(self.sessions.open(name, self.now))
        except SessionLimitReached:
            self._dropped(set(self.used_at) - set(self.table.sessions))
            assert all(self.in_flight.values())
            return
        self.used_at[name], self.in_flight[name], self.sizes[name] = self.now, 0, 0

    @precondition(lambda self: self.used_at)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.now += 1
        name = data.draw(st.sampled_from(sorted(self.used_at)))
        self.sessions.begin_call(name, self.now)
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
        self._dropped(self.sessions.end_call(name, self.now, 1, self.sizes[name]))

    @rule(seconds=st.integers(1, 12))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        expired = {
            name for name, used_at in self.used_at.items() if not self.in_flight[name] and self.now >= used_at + 10
        }
        dropped = self.sessions.pass_time(self.now)
        assert dropped == expired
        for name in dropped:
            self._forget(name)

    @invariant()
    def holds_what_is_there(self) -> None:
        assert set(self.table.sessions) == set(self.used_at)
        assert self.table.size_bytes == sum(self.sizes.values()) + SESSION_BYTES * len(self.used_at)
        most = MOST_SESSIONS * SESSION_BYTES + MOST_BYTES
        assert self.table.size_bytes <= most or all(self.in_flight.values())


test_any_sessions = AnySessions.TestCase
