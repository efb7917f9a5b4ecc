"""`make bench-agents`: what it compares, and which bounds fail it."""

from benchmarks.agents.conversations import CallTime, Workload
from benchmarks.agents.figures import Round, figures_of, missed

WORKLOAD = Workload(agents=2, calls=5, new_tokens=10)


def rounds(*seconds: float, first_s: float = 0.001, processor_s: float = 0.01) -> list[Round]:
    """Each with one call, which took as long as the round."""
    return [Round(one, processor_s, [CallTime(first_s, one)]) for one in seconds]


ALONE = {
    "vllm": rounds(0.010, 0.012, 0.500),
    "plain": rounds(0.020, 0.0185, 0.015),
    "session": rounds(0.030, 0.035, 0.025),
    "vllm_stream": rounds(0.010, first_s=0.004),
    "plain_stream": rounds(0.017, first_s=0.009),
    "session_stream": rounds(0.020, first_s=0.0145),
    "vllm_tokens": rounds(0.015),
}
TOGETHER = {
    "vllm": rounds(1.0, 2.0, 4.0, processor_s=0.02),
    "plain": rounds(1.0, 2.5, 5.0),
    "session": rounds(1.0, 2.0, 4.4),
    "vllm_stream": rounds(1.0, 1.0, 1.0),
    "plain_stream": rounds(2.0, 2.0, 2.0),
    "session_stream": rounds(4.0, 4.0, 4.0),
    "vllm_tokens": rounds(2.0, 4.0, 8.0),
}


def test_the_time_that_a_call_takes_longer_is_that_of_the_median_calls() -> None:
    figures = figures_of(ALONE, TOGETHER, WORKLOAD)
    assert figures["added_ms"] == {"plain": 6.5, "session": 18.0, "plain_stream": 7.0, "session_stream": 10.0}
    assert figures["added_to_first_ms"] == {"plain_stream": 5.0, "session_stream": 10.5}


def test_throughputs_are_compared_within_each_round() -> None:
    figures = figures_of(ALONE, TOGETHER, WORKLOAD)
    ratios = {"plain": 0.8, "session": 1.0, "plain_stream": 0.5, "session_stream": 0.25}
    assert figures["throughput_ratios"] == ratios
    assert figures["session_over_vllm_that_shows_tokens"] == 2.0


def test_all_tokens_of_a_round_and_the_processor_time_of_a_call_are_shown() -> None:
    figures = figures_of(ALONE, TOGETHER, WORKLOAD)
    assert (figures["tokens_per_s"]["vllm"], figures["tokens_per_s"]["session_stream"]) == (50, 25)
    assert (figures["processor_ms_per_call"]["vllm"], figures["processor_ms_per_call"]["plain"]) == (2.0, 1.0)


def test_each_bound_that_does_not_hold_is_named_and_streams_have_none_on_throughput() -> None:
    assert missed(figures_of(ALONE, TOGETHER, WORKLOAD)) == [
        "session: a call takes 18 ms more than by vLLM's server, more than 10 ms",
        "plain: 0.8 of the throughput of vLLM's server, less than 0.95",
    ]
