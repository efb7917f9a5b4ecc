"""Whether what a generator replica generates can be used. A state machine without I/O.

A replica whose GPU or weights are damaged may go on answering, with log-probabilities that are NaN. Each such
generation fails and is tried again on another replica; a replica that keeps producing them must be replaced.
"""

from collections import deque

RECENT_GENERATIONS = 64
MOST_NOT_FINITE = 16
"""Of the recent generations. A quarter: chance, such as a bit that flipped once, gives one or two."""
LEAST_GROUPS = 4
"""One prompt may overflow on every replica, and its group may have hundreds of rollouts: no replica is at fault."""


class OutputsNotFinite(Exception):
    """The replica keeps generating log-probabilities that are NaN or infinite. Serve replaces it."""


class OutputsDiffer(Exception):
    """The replica's log-probabilities are not those of other replicas with the same weights. Serve replaces it."""


class OutputHealth:
    """Remembers which of the recent generations of one replica had log-probabilities that are not finite."""

    def __init__(self) -> None:
        self._recent: deque[str | None] = deque(maxlen=RECENT_GENERATIONS)
        """The group of each generation that was not finite, `None` for the others."""
        self.distrusted: str | None = None
        """Why the replica is out of service."""

    def record(self, group: str, is_finite: bool) -> None:
        """Adds one generation that has ended; `group` is its `GenerationRequest.group`."""
        self._recent.append(None if is_finite else group)

    def check(self) -> None:
        """Raises `OutputsNotFinite` if too many of the recent generations were not finite, or `OutputsDiffer`."""
        if self.distrusted is not None:
            raise OutputsDiffer(f"The replica was taken out of service: {self.distrusted}.")
        faulty = [group for group in self._recent if group is not None]
        if len(faulty) >= MOST_NOT_FINITE and len(set(faulty)) >= LEAST_GROUPS:
            raise OutputsNotFinite(
                f"{len(faulty)} of the last {len(self._recent)} generations had log-probabilities that are NaN or "
                "infinite."
            )
