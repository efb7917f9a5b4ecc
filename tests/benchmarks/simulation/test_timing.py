"""When the generations of a simulated engine end: exact times, and invariants over random sequences of events."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation.timing import TimedGenerations, Timing

TIMING = Timing(time_to_first_token_s=1.0, time_per_token_s=0.5, max_num_seqs=2)


def generations(timing: Timing = TIMING) -> TimedGenerations[str]:
    return TimedGenerations(timing)


def test_a_generation_takes_the_time_to_its_first_token_and_the_time_of_every_token() -> None:
    ongoing = generations()
    ongoing.submit("a", tokens=4, now=10.0)
    assert ongoing.next_end == 13.0
    assert ongoing.pop_finished(12.9) == []
    assert ongoing.pop_finished(13.0) == ["a"]
    assert ongoing.next_end is None


def test_a_waiting_generation_starts_when_another_one_ended_not_when_that_was_noticed() -> None:
    ongoing = generations()
    for name, tokens in (("a", 2), ("b", 4), ("c", 2)):
        ongoing.submit(name, tokens, now=0.0)
    assert ongoing.pop_finished(2.5) == ["a"]
    assert ongoing.pop_finished(3.0) == ["b"]
    assert ongoing.next_end == 4.0


def test_generations_that_ended_since_the_last_call_come_in_the_order_of_their_ends() -> None:
    ongoing = generations()
    for name, tokens in (("a", 8), ("b", 2), ("c", 2), ("d", 1)):
        ongoing.submit(name, tokens, now=0.0)
    assert ongoing.pop_finished(100.0) == ["b", "c", "a", "d"]


def test_cancelling_a_running_generation_starts_the_next_one_at_that_moment() -> None:
    ongoing = generations(Timing(time_per_token_s=1.0, max_num_seqs=1))
    ongoing.submit("runs", 100, now=0.0)
    ongoing.submit("waits", 3, now=0.0)
    ongoing.cancel("runs", now=2.0)
    assert ongoing.next_end == 5.0
    assert ongoing.pop_finished(5.0) == ["waits"]


def test_cancelling_tells_when_a_generation_that_runs_would_have_ended() -> None:
    ongoing = generations(Timing(time_per_token_s=1.0, max_num_seqs=1))
    for name in ("runs", "waits"):
        ongoing.submit(name, 4, now=1.0)
    assert [ongoing.cancel(name, now=2.0) for name in ("waits", "runs", "unknown")] == [None, 5.0, None]


@pytest.mark.parametrize(("seconds", "missing"), [(0.0, 0), (0.1, 1), (0.5, 1), (0.6, 2), (0.1 + 0.2 + 0.2, 1)])
def test_a_token_is_missing_until_its_time_has_passed_whatever_times_lose_by_rounding(
    seconds: float, missing: int
) -> None:
    assert TIMING.tokens_missing(seconds) == missing
    assert Timing().tokens_missing(seconds) == 0


def test_of_the_waiting_generations_the_lowest_virtual_time_starts_first() -> None:
    ongoing = generations(Timing(time_per_token_s=1.0, max_num_seqs=1))
    for name, virtual_time in (("runs", 0), ("late", 9), ("first", 2), ("cancelled", 1), ("second", 2)):
        ongoing.submit(name, 1, now=0.0, virtual_time=virtual_time)
    ongoing.cancel("cancelled", now=0.5)
    assert ongoing.pop_finished(10.0) == ["runs", "first", "second", "late"]


def test_a_generation_that_is_cancelled_while_it_waits_never_runs() -> None:
    ongoing = generations(Timing(time_per_token_s=1.0, max_num_seqs=1))
    for name in ("runs", "cancelled", "next"):
        ongoing.submit(name, 1, now=0.0)
    ongoing.cancel("cancelled", now=0.5)
    assert ongoing.pop_finished(10.0) == ["runs", "next"]


def test_cancelling_a_finished_generation_has_no_effect() -> None:
    ongoing = generations()
    ongoing.submit("a", 1, now=0.0)
    assert ongoing.pop_finished(2.0) == ["a"]
    ongoing.cancel("a", now=2.0)
    assert (len(ongoing), ongoing.next_end) == (0, None)


def test_with_both_times_0_every_generation_ends_when_it_is_submitted_whatever_may_run_at_once() -> None:
    ongoing = generations(Timing(max_num_seqs=1))
    for name in ("a", "b", "c"):
        ongoing.submit(name, 1000, now=7.0)
    assert ongoing.pop_finished(7.0) == ["a", "b", "c"]


@dataclass(frozen=True)
class Submission:
    after_s: float
    tokens: int


@dataclass(frozen=True)
class Cancellation:
    after_s: float
    pick: int


SECONDS = st.floats(0, 5)
EVENTS = st.lists(
    st.builds(Submission, SECONDS, st.integers(1, 10)) | st.builds(Cancellation, SECONDS, st.integers(0, 1000)),
    max_size=40,
)
TIMINGS = st.builds(
    Timing, time_to_first_token_s=st.floats(0, 2), time_per_token_s=st.floats(0, 1), max_num_seqs=st.integers(1, 4)
)


@dataclass
class History:
    """Plays events and records what became of each generation, by its number."""

    timing: Timing
    now: float = 0.0
    submitted: dict[int, Submission] = field(default_factory=dict)
    submitted_at: dict[int, float] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    ended: dict[int, float] = field(default_factory=dict)

    def play(self, events: list[Submission | Cancellation]) -> None:
        ongoing: TimedGenerations[int] = TimedGenerations(self.timing)
        for event in events:
            self.advance(ongoing, self.now + event.after_s)
            if isinstance(event, Submission):
                name = len(self.submitted)
                self.submitted[name], self.submitted_at[name] = event, self.now
                ongoing.submit(name, event.tokens, self.now)
            elif left := sorted(self.submitted.keys() - self.cancelled - self.ended.keys()):
                name = left[event.pick % len(left)]
                ongoing.cancel(name, self.now)
                self.cancelled.add(name)
            assert ongoing.running <= self.timing.max_num_seqs
            assert len(ongoing) == len(self.submitted) - len(self.cancelled) - len(self.ended)
        self.advance(ongoing, float("inf"))

    def advance(self, ongoing: TimedGenerations[int], until: float) -> None:
        while (end := ongoing.next_end) is not None and end <= until:
            for name in ongoing.pop_finished(end):
                assert name not in self.ended
                self.ended[name] = end
        self.now = until

    @property
    def started(self) -> dict[int, float]:
        return {name: end - self.timing.duration_s(self.submitted[name].tokens) for name, end in self.ended.items()}


@given(TIMINGS, EVENTS)
def test_every_generation_ends_exactly_once_or_was_cancelled(
    timing: Timing, events: list[Submission | Cancellation]
) -> None:
    history = History(timing)
    history.play(events)
    assert history.ended.keys() | history.cancelled == history.submitted.keys()
    assert not history.ended.keys() & history.cancelled


@given(TIMINGS, EVENTS)
def test_generations_start_in_the_order_of_submission_and_not_before_it(
    timing: Timing, events: list[Submission | Cancellation]
) -> None:
    history = History(timing)
    history.play(events)
    starts = [history.started[name] for name in sorted(history.ended)]
    assert all(earlier <= later + 1e-9 for earlier, later in pairwise(starts))
    assert all(start >= history.submitted_at[name] - 1e-9 for name, start in history.started.items())


@given(TIMINGS, st.lists(st.integers(1, 10), max_size=30))
def test_as_many_run_at_once_as_may_while_others_wait(timing: Timing, tokens: list[int]) -> None:
    ongoing: TimedGenerations[int] = TimedGenerations(timing)
    for name, length in enumerate(tokens):
        ongoing.submit(name, length, now=0.0)
    while (end := ongoing.next_end) is not None:
        assert ongoing.running == min(timing.max_num_seqs, len(ongoing))
        ongoing.pop_finished(end)
    assert len(ongoing) == 0


def test_a_pause_puts_off_every_end_and_what_begins_in_it_begins_at_its_end() -> None:
    ongoing = generations()
    ongoing.submit("before", tokens=4, now=0.0)
    ongoing.pause(5.0, now=1.0)
    ongoing.submit("within", tokens=4, now=2.0)
    assert ongoing.end_of("before") == 8.0
    assert ongoing.end_of("within") == 9.0
    assert [ongoing.progressed_to(now) for now in (3.0, 7.0)] == [6.0, 7.0]
    assert ongoing.pop_finished(7.9) == []
    assert ongoing.pop_finished(8.0) == ["before"]
