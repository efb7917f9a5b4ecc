"""Which sessions are dropped, and which calls are refused."""

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.sessions.records import OpenSession, SessionLimitReached, SessionUnknown
from deployments.sessions.session_table import SESSION_BYTES, KeptSession, SessionsSettings, SessionTable
from rollout_client.contract.sessions import SessionLimits, SessionRequest

MOST_BYTES = 3 * SESSION_BYTES + 100
IDLE_S = 10


def empty_table() -> SessionTable:
    return SessionTable(SessionsSettings(max_bytes=MOST_BYTES, lease_s=1e9), (), 0)


def opened(name: str, namespace: str = "", **limits: float) -> OpenSession:
    given = SessionLimits.model_validate({"idle_s": IDLE_S} | limits)
    return OpenSession(name, namespace, "", "http://service", SessionRequest(limits=given))


def grow(table: SessionTable, kept: KeptSession, tokens: int, size_bytes: int) -> None:
    """Its record has so many tokens and bytes."""
    assert kept.read is not None
    kept.read.record.total_tokens, kept.read.record.size_bytes = tokens, size_bytes
    table.note_record(kept)


@pytest.mark.parametrize("limits", [{"max_calls": 1}, {"max_tokens": 5}, {"max_calls_in_flight": 1}])
def test_a_call_beyond_a_limit_is_refused(limits: dict[str, float]) -> None:
    [reason] = limits
    table = empty_table()
    kept = table.open(opened("a", "", **limits), 0, 0)
    for _ in range(2):
        table.begin_call(kept, "the same", 0)
    if reason == "max_tokens":
        table.end_call("a", "the same", 0)
        grow(table, kept, 5, 1)
    with pytest.raises(SessionLimitReached, match=rf"^limits\.{reason}: .* reached limits\.{reason}: [15] of [15]"):
        table.begin_call(kept, "another", 1)


@dataclass
class Known:
    """A session as the machine knows it."""

    kept: KeptSession | None
    namespace: str
    used_at: float
    size_bytes: int
    record_bytes: int = 0
    calls: list[str] = field(default_factory=list)


class AnySessions(RuleBasedStateMachine):
    """Sessions of two namespaces, against a list of what was done."""

    def __init__(self) -> None:
        super().__init__()
        self.table = empty_table()
        self.now = 0.0
        self.count = 0
        self.known: dict[str, Known] = {}
        self.namespaces: list[str] = []
        """In the order in which they were used first, which decides between two that keep the same."""
        self.dropped: list[KeptSession] = []

    def next(self) -> str:
        """A new name; a second passes."""
        self.now += 1
        self.count += 1
        return str(self.count)

    def make_room(self) -> None:
        """Of the namespace that keeps the most, the session goes that was idle the longest."""
        while sum(one.size_bytes for one in self.known.values()) > MOST_BYTES:
            idle = {name: one for name, one in self.known.items() if not one.calls}
            callers = [one for one in self.namespaces if one in {each.namespace for each in idle.values()}]
            if not callers:
                return
            largest = max(
                callers, key=lambda caller: sum(e.size_bytes for e in self.known.values() if e.namespace == caller)
            )
            self.forget(min((name for name in idle if idle[name].namespace == largest), key=lambda n: idle[n].used_at))

    def forget(self, name: str) -> None:
        if (kept := self.known.pop(name).kept) is not None:
            self.dropped.append(kept)

    @rule(namespace=st.sampled_from("ab"), size=st.sampled_from([0, 60, SESSION_BYTES, 4 * SESSION_BYTES]))
    def open(self, namespace: str, size: int) -> None:
        name = self.next()
        self.known[name] = one = Known(None, namespace, self.now, SESSION_BYTES + size)
        self.namespaces += [] if namespace in self.namespaces else [namespace]
        self.make_room()
        if name in self.known:
            one.kept = self.table.open(opened(name, namespace), size, self.now)
        else:
            with pytest.raises(SessionLimitReached):
                self.table.open(opened(name, namespace), size, self.now)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        call, one = self.next(), self.known[data.draw(st.sampled_from(sorted(self.known)))]
        assert one.kept is not None
        self.table.begin_call(one.kept, call, self.now)
        one.used_at = self.now
        one.calls.append(call)

    @precondition(lambda self: any(one.calls for one in self.known.values()))
    @rule(data=st.data(), grown=st.integers(0, 60))
    def finish(self, data: st.DataObject, grown: int) -> None:
        self.now += 1
        name = data.draw(st.sampled_from(sorted(name for name, one in self.known.items() if one.calls)))
        one = self.known[name]
        assert one.kept is not None
        self.table.end_call(name, one.calls.pop(), self.now)
        one.used_at, one.record_bytes, one.size_bytes = self.now, one.record_bytes + grown, one.size_bytes + grown
        grow(self.table, one.kept, 1, one.record_bytes)
        self.make_room()

    @precondition(lambda self: self.dropped)
    @rule()
    def go_on_with_one_that_was_dropped(self) -> None:
        grow(self.table, self.dropped[-1], 1, 1000)
        with pytest.raises(SessionUnknown):
            self.table.begin_call(self.dropped[-1], "late", self.now)

    @rule(seconds=st.integers(1, IDLE_S + 2))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        for name, one in list(self.known.items()):
            if not one.calls and self.now >= one.used_at + IDLE_S:
                self.forget(name)
        self.table.pass_time(self.now)

    @invariant()
    def holds_what_is_there(self) -> None:
        assert self.table.sessions.keys() == self.known.keys()
        assert self.table.size_bytes == sum(one.size_bytes for one in self.known.values())


test_any_sessions = AnySessions.TestCase
