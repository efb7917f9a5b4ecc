"""When generations end at a pace: exact times, and what holds whatever comes and goes."""

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from deployments.simulation.timing import TimedGenerations, Timing

PACE = Timing(time_to_first_token_s=1.0, time_per_token_s=0.5, max_num_seqs=2)


def generations(pace: Timing = PACE) -> TimedGenerations[str]:
    return TimedGenerations(pace)


def test_a_generation_takes_its_first_token_and_every_token() -> None:
    under_way = generations()
    under_way.arrive("a", tokens=4, now=10.0)
    assert under_way.next_end == 13.0
    assert under_way.ended(12.9) == []
    assert under_way.ended(13.0) == ["a"]
    assert under_way.next_end is None


def test_one_that_waits_begins_when_the_place_became_free_not_when_somebody_looked() -> None:
    under_way = generations()
    for name, tokens in (("a", 2), ("b", 4), ("c", 2)):
        under_way.arrive(name, tokens, now=0.0)
    assert under_way.ended(2.5) == ["a"]
    assert under_way.ended(3.0) == ["b"]
    assert under_way.next_end == 4.0


def test_all_that_ended_in_a_long_time_are_told_in_the_order_of_their_ends() -> None:
    under_way = generations()
    for name, tokens in (("a", 8), ("b", 2), ("c", 2), ("d", 1)):
        under_way.arrive(name, tokens, now=0.0)
    assert under_way.ended(100.0) == ["b", "c", "a", "d"]


def test_one_that_is_dropped_makes_room_at_that_moment() -> None:
    under_way = generations(Timing(time_per_token_s=1.0, max_num_seqs=1))
    under_way.arrive("runs", 100, now=0.0)
    under_way.arrive("waits", 3, now=0.0)
    under_way.drop("runs", now=2.0)
    assert under_way.next_end == 5.0
    assert under_way.ended(5.0) == ["waits"]


def test_one_that_is_dropped_while_it_waits_never_runs() -> None:
    under_way = generations(Timing(time_per_token_s=1.0, max_num_seqs=1))
    for name in ("runs", "dropped", "next"):
        under_way.arrive(name, 1, now=0.0)
    under_way.drop("dropped", now=0.5)
    assert under_way.ended(10.0) == ["runs", "next"]


def test_what_has_ended_can_be_dropped_without_effect() -> None:
    under_way = generations()
    under_way.arrive("a", 1, now=0.0)
    assert under_way.ended(2.0) == ["a"]
    under_way.drop("a", now=2.0)
    assert (len(under_way), under_way.next_end) == (0, None)


def test_without_times_everything_ends_as_it_arrives_however_few_may_run() -> None:
    under_way = generations(Timing(max_num_seqs=1))
    for name in ("a", "b", "c"):
        under_way.arrive(name, 1000, now=7.0)
    assert under_way.ended(7.0) == ["a", "b", "c"]


@dataclass(frozen=True)
class Arrival:
    after_s: float
    tokens: int


@dataclass(frozen=True)
class Dropping:
    after_s: float
    pick: int


SECONDS = st.floats(0, 5)
EVENTS = st.lists(
    st.builds(Arrival, SECONDS, st.integers(1, 10)) | st.builds(Dropping, SECONDS, st.integers(0, 1000)), max_size=40
)
PACES = st.builds(
    Timing, time_to_first_token_s=st.floats(0, 2), time_per_token_s=st.floats(0, 1), max_num_seqs=st.integers(1, 4)
)


@dataclass
class Story:
    """What happens, and what came of it, name by name."""

    pace: Timing
    now: float = 0.0
    arrived: dict[int, Arrival] = field(default_factory=dict)
    arrived_at: dict[int, float] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    ended: dict[int, float] = field(default_factory=dict)

    def play(self, events: list[Arrival | Dropping]) -> None:
        under_way: TimedGenerations[int] = TimedGenerations(self.pace)
        for event in events:
            self.advance(under_way, self.now + event.after_s)
            if isinstance(event, Arrival):
                name = len(self.arrived)
                self.arrived[name], self.arrived_at[name] = event, self.now
                under_way.arrive(name, event.tokens, self.now)
            elif left := sorted(self.arrived.keys() - self.dropped - self.ended.keys()):
                name = left[event.pick % len(left)]
                under_way.drop(name, self.now)
                self.dropped.add(name)
            assert under_way.running <= self.pace.max_num_seqs
            assert len(under_way) == len(self.arrived) - len(self.dropped) - len(self.ended)
        self.advance(under_way, float("inf"))

    def advance(self, under_way: TimedGenerations[int], until: float) -> None:
        while (end := under_way.next_end) is not None and end <= until:
            for name in under_way.ended(end):
                assert name not in self.ended
                self.ended[name] = end
        self.now = until

    @property
    def began(self) -> dict[int, float]:
        return {name: end - self.pace.duration_s(self.arrived[name].tokens) for name, end in self.ended.items()}


@given(PACES, EVENTS)
def test_whatever_comes_and_goes_each_ends_exactly_once_or_was_dropped(
    pace: Timing, events: list[Arrival | Dropping]
) -> None:
    story = Story(pace)
    story.play(events)
    assert story.ended.keys() | story.dropped == story.arrived.keys()
    assert not story.ended.keys() & story.dropped


@given(PACES, EVENTS)
def test_whatever_comes_and_goes_who_arrived_first_begins_first(pace: Timing, events: list[Arrival | Dropping]) -> None:
    story = Story(pace)
    story.play(events)
    began = [story.began[name] for name in sorted(story.ended)]
    assert all(earlier <= later + 1e-9 for earlier, later in pairwise(began))
    assert all(begin >= story.arrived_at[name] - 1e-9 for name, begin in story.began.items())


@given(PACES, st.lists(st.integers(1, 10), max_size=30))
def test_places_are_never_left_empty_while_somebody_waits(pace: Timing, tokens: list[int]) -> None:
    under_way: TimedGenerations[int] = TimedGenerations(pace)
    for name, length in enumerate(tokens):
        under_way.arrive(name, length, now=0.0)
    while (end := under_way.next_end) is not None:
        assert under_way.running == min(pace.max_num_seqs, len(under_way))
        under_way.ended(end)
    assert len(under_way) == 0
