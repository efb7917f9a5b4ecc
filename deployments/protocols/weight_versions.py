"""The spans of weight versions of a response that several generations have made. No I/O."""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar


class VersionSpan(Protocol):
    """Tokens `[start, end)` were sampled with the weights of `version`."""

    @property
    def version(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


Span = TypeVar("Span", bound=VersionSpan)


def joined_spans(
    first: Iterable[Span], second: Iterable[VersionSpan], shift: int, span_of: Callable[[str, int, int], Span]
) -> list[Span]:
    """The spans of both parts; one that goes on with the version of the span before it is one span with that.

    Args:
        shift: tokens before the second part.
        span_of: makes a span of version, start and end.
    """
    joined = list(first)
    for span in second:
        start, end = span.start + shift, span.end + shift
        if joined and joined[-1].version == span.version and joined[-1].end == start:
            start = joined.pop().start
        joined.append(span_of(span.version, start, end))
    return joined
