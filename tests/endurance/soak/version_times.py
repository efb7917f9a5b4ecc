"""When each version of the weights could be current, as its trainer sees it. No I/O."""

from bisect import bisect_right, insort
from math import inf


class VersionTimes:
    """A version can be current from the moment in which its push is sent until the push of a newer one has ended.

    Times are seconds of one monotonic clock. Version 0 is current from the beginning.
    """

    def __init__(self) -> None:
        self._sent = {0: -inf}
        self._acknowledged = [0]
        """In order."""
        self._ended = {0: -inf}
        """When the pushes of the acknowledged versions ended."""

    @property
    def newest(self) -> int:
        """The newest version that was acknowledged."""
        return self._acknowledged[-1]

    def send(self, version: int, now: float) -> None:
        self._sent[version] = now

    def refuse(self, version: int) -> None:
        """The push has failed: the number is free again."""
        del self._sent[version]

    def acknowledge(self, version: int, now: float) -> None:
        insort(self._acknowledged, version)
        self._ended[version] = now

    def could_be_current(self, version: int, begin: float, end: float) -> bool:
        """Whether the version could be current at some moment between `begin` and `end`."""
        if version not in self._sent or self._sent[version] > end:
            return False
        newer = self._acknowledged[bisect_right(self._acknowledged, version) :][:1]
        return all(self._ended[other] >= begin for other in newer)
