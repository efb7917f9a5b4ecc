"""What the benchmark says of the rounds that it has played. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.agents.conversations import CallTime, Workload

SAME_AT_VLLM = {
    "plain": "vllm",
    "session": "vllm",
    "plain_stream": "vllm_stream",
    "session_stream": "vllm_stream",
}
"""The ways to call the service, each with the way to call vLLM's server that it is compared with."""
MOST_ADDED_MS = 10.0
LEAST_RATIO = 0.95
BOUND_RATIOS = ("plain", "session")
"""Ways whose throughput has a bound. Streams are reported beside them."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one way took for one workload."""

    seconds: float
    processor_seconds: float
    """Of everything but the engine."""
    calls: Sequence[CallTime]


Rounds = Mapping[str, Sequence[Round]]
"""By way; those of the same place were played one after the other."""


def figures_of(alone: Rounds, together: Rounds, workload: Workload) -> dict[str, Any]:
    """Args: `workload` is that of `together`; in `alone` one agent plays at a time."""
    compared = SAME_AT_VLLM.items()
    return {
        "added_ms": {
            way: round(call_ms(alone[way], "whole_s") - call_ms(alone[vllm], "whole_s"), 2) for way, vllm in compared
        },
        "added_to_first_ms": {
            way: round(call_ms(alone[way], "first_s") - call_ms(alone[vllm], "first_s"), 2)
            for way, vllm in compared
            if way.endswith("stream")
        },
        "throughput_ratios": {way: ratio(together[vllm], together[way]) for way, vllm in compared},
        # A trainer with vLLM's server would ask for these: a session records them whatever was asked for.
        "session_over_vllm_that_shows_tokens": ratio(together["vllm_tokens"], together["session"]),
        "tokens_per_s": {
            way: round(workload.all_tokens / median(round_.seconds for round_ in rounds))
            for way, rounds in together.items()
        },
        "processor_ms_per_call": {
            way: round(1000 * median(round_.processor_seconds for round_ in rounds) / workload.all_calls, 2)
            for way, rounds in together.items()
        },
    }


def call_ms(rounds: Sequence[Round], time: str) -> float:
    """The median of all calls."""
    seconds: list[float] = [getattr(call, time) for round_ in rounds for call in round_.calls]
    return 1000 * median(seconds)


def ratio(vllm: Sequence[Round], service: Sequence[Round]) -> float:
    """Of the throughputs, the median of all rounds: what slows a machine for a minute slows both of a round."""
    pairs = zip(vllm, service, strict=True)
    middle: float = median(theirs.seconds / ours.seconds for theirs, ours in pairs)
    return round(middle, 3)


def missed(figures: Mapping[str, Any]) -> list[str]:
    """The bounds that do not hold, in words."""
    slow = [
        f"{way}: a call takes {added:g} ms more than by vLLM's server, more than {MOST_ADDED_MS:g} ms"
        for way, added in figures["added_ms"].items()
        if added > MOST_ADDED_MS
    ]
    ratios = figures["throughput_ratios"]
    return slow + [
        f"{way}: {ratios[way]:g} of the throughput of vLLM's server, less than {LEAST_RATIO:g}"
        for way in BOUND_RATIOS
        if ratios[way] < LEAST_RATIO
    ]
