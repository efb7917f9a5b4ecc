"""Pass rates of the samples of data sets, by policy and version, which the job store remembers. No I/O.

They are in memory, and bounded: the samples whose rollouts ended longest ago are forgotten, and after a restart of the
store all are. A sample that is forgotten counts as one that was never played.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MOST_SAMPLES = 2**18
"""About 120 MB, with ids of 30 characters."""
VERSIONS_OF_A_SAMPLE = 4


class SampleKey(NamedTuple):
    """A sample, as one policy plays it."""

    policy: str | None
    task_name: str
    sample_id: str


class RewardNote(NamedTuple):
    """The total reward of a rollout that was played to its end."""

    key: SampleKey
    version: int
    """That was current at its end."""
    reward: float


class VersionRewards(NamedTuple):
    """The rewards of a sample under one version."""

    version: int
    total: float
    rollouts: int


class PassRates:
    """Guarantee: at most `most_samples` are remembered, each under its `VERSIONS_OF_A_SAMPLE` latest versions."""

    def __init__(self, most_samples: int = MOST_SAMPLES) -> None:
        self._most_samples = most_samples
        self._rewards: OrderedDict[SampleKey, tuple[VersionRewards, ...]] = OrderedDict()
        """Versions ascend. The samples noted last are at the end."""

    def note(self, notes: Iterable[RewardNote]) -> None:
        for key, version, reward in notes:
            known = {rewards.version: rewards for rewards in self._rewards.pop(key, ())}
            before = known.get(version, VersionRewards(version, 0.0, 0))
            known[version] = VersionRewards(version, before.total + reward, before.rollouts + 1)
            self._rewards[key] = tuple(sorted(known.values())[-VERSIONS_OF_A_SAMPLE:])
        while len(self._rewards) > self._most_samples:
            self._rewards.popitem(last=False)

    def rates(self, keys: Sequence[SampleKey], since: int) -> list[float | None]:
        """The mean reward of each sample under the versions from `since` on; `None` where none is known."""
        return [self._rate(key, since) for key in keys]

    def _rate(self, key: SampleKey, since: int) -> float | None:
        counted = [rewards for rewards in self._rewards.get(key, ()) if rewards.version >= since]
        rollouts = sum(rewards.rollouts for rewards in counted)
        return sum(rewards.total for rewards in counted) / rollouts if rollouts else None
