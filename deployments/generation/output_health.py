"""Whether the outputs of a generator replica can be used: finite log-probabilities, of one generation and of many.

No I/O, no vLLM. A replica whose GPU or weights are damaged may go on answering, with log-probabilities that are NaN.
Each such generation fails and is tried again on another replica; a replica that keeps producing them must be replaced.
"""

import math
from array import array
from collections import deque

from deployments.failures import GenerationNotFinite


def refuse_not_finite(logprobs: "array[float]") -> None:
    """Raises `GenerationNotFinite` if one of the log-probabilities (float32) is NaN or infinite.

    Not even -inf can be right: it says that the token has probability 0 under the distribution that it was sampled
    from. With NaN among the logits of a position, the engine returns an arbitrary token.
    """
    # A sum of float32 in float64 does not overflow. For the token of a streamed event NumPy takes twenty times as long.
    if not math.isfinite(sum(logprobs)):
        first = next(place for place, logprob in enumerate(logprobs) if not math.isfinite(logprob))
        raise GenerationNotFinite(
            f"The engine gave {logprobs[first]} as the log-probability of token {first} of {len(logprobs)}."
        )


RECENT_GENERATIONS = 64
MOST_NOT_FINITE = 16
"""Bound for the recent generations. A quarter: chance, such as a bit that flipped once, gives one or two."""
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
