"""When the generations of a simulated engine end: exact times, and invariants over random sequences of events."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation.timing import TimedGenerations, Timing

TIMING = Timing(time_to_first_token_s=1.0, time_per_token_s=0.5, max_num_seqs=2)


def generations(timing: Timing = TIMING) -> TimedGenerations[str]:
    return TimedGenerations(timing)


def test_a_generation_takes_the_time_of_all_its_tokens() -> None:
    ongoing = generations()
    ongoing.submit("a", tokens=4, now=10.0)
    assert ongoing.next_end == 13.0
    assert ongoing.pop_finished(12.9) == []
    assert ongoing.pop_finished(13.0) == ["a"]
    assert ongoing.next_end is None


@given(
    st.builds(
        Timing,
        time_to_first_token_s=st.floats(0, 2),
        time_per_token_s=st.floats(0, 1),
        max_num_seqs=st.integers(1, 4),
    ),
    st.lists(st.integers(1, 10), max_size=30),
)
def test_as_many_run_at_once_as_may_while_others_wait(timing: Timing, tokens: list[int]) -> None:
    ongoing: TimedGenerations[int] = TimedGenerations(timing)
    for name, length in enumerate(tokens):
        ongoing.submit(name, length, now=0.0)
    while (end := ongoing.next_end) is not None:
        assert ongoing.running == min(timing.max_num_seqs, len(ongoing))
        ongoing.pop_finished(end)
    assert len(ongoing) == 0


def test_a_pause_delays_every_end_and_every_start_within_it() -> None:
    ongoing = generations()
    ongoing.submit("before", tokens=4, now=0.0)
    ongoing.pause(5.0, now=1.0)
    ongoing.submit("within", tokens=4, now=2.0)
    assert ongoing.end_of("before") == 8.0
    assert ongoing.end_of("within") == 9.0
    assert [ongoing.progressed_to(now) for now in (3.0, 7.0)] == [6.0, 7.0]
    assert ongoing.pop_finished(7.9) == []
    assert ongoing.pop_finished(8.0) == ["before"]
