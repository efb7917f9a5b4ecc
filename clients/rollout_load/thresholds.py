"""What makes a run fail: each bound that was asked for and is not kept, as a sentence. Pure."""

from collections.abc import Iterator

from rollout_load.options import FIRST, Limits
from rollout_load.summary import Summary, kind_of_entry


def broken_limits(summary: Summary, limits: Limits) -> list[str]:
    """A run without requests breaks the first bound, whatever the bounds are."""
    if not summary.requests:
        return ["No request was answered."]
    return [*broken_rates(summary, limits), *broken_latencies(summary, limits)]


def broken_rates(summary: Summary, limits: Limits) -> Iterator[str]:
    if summary.error_rate > limits.max_error_rate:
        yield f"{summary.error_rate:.2%} of the requests failed; {limits.max_error_rate:.2%} may."
    least = {
        "tokens": (summary.tokens_per_s, limits.min_tokens_per_s),
        "turns": (summary.turns_per_s, limits.min_turns_per_s),
    }
    for what, (rate, bound) in least.items():
        if bound is not None and rate < bound:
            yield f"There were {rate:.1f} {what} a second; {bound:g} are wanted."


def broken_latencies(summary: Summary, limits: Limits) -> Iterator[str]:
    bounds = limits.max_p95_s or {}
    measured = {name: (kind_of_entry(name), entry.p95_s) for name, entry in summary.entries.items()}
    if summary.first is not None:
        measured["The first finished rollout of a stream"] = (FIRST, summary.first.p95_s)
    for name, (kind, p95_s) in measured.items():
        # The bound of all classes is one of whole requests.
        bound = bounds.get(kind, None if kind == FIRST else bounds.get(""))
        if bound is not None and p95_s > bound:
            yield f"{name}: the p95 is {p95_s:.3f} s; {bound:g} s are allowed."
