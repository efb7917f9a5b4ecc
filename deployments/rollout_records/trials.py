"""Which generator replica computes other log-probabilities than its siblings, as a state machine without I/O.

Of a rollout that is looked at there are four computations of the same tokens: the replica has sampled them and scores
them again, and two others score them. All four differ by rounding, which depends on the prompt and on how a token is
computed; only within one rollout is it the same for all. The replica parts if its two differ from both of the others by
a multiple of what either pair differs by itself, and by more than a floor.

Guarantees: a replica is convicted by such votes alone, of at least `LEAST_AGAINST` rollouts of as many groups; who
suspects it, and how often, chooses only what is looked at. A rollout is looked at once. At most `BURST` rollouts, and
then one every `CHECK_EVERY_S`, are looked at, whatever is suspected; after a conviction none for `PAUSE_S`.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deployments.rollout_records.ratios import MOST_COUNTED_SIZE, sizes_of

Key = TypeVar("Key")
Value = TypeVar("Value")
LEAST_SIZE = 0.05
"""A replica does not part if its tokens differ by less than this on average, a ratio of 1.05. bfloat16 makes 0.02."""
LEAST_FACTOR = 2.0
"""Between what parts a replica from two others, and what its own two computations, or theirs, differ by."""
LEAST_TOKENS = 8
"""Fewer tokens of a rollout say nothing: by chance alone, one in some may look like a replica that parts."""
LEAST_AGAINST = 4
MOST_IN_FAVOUR = 1 / 3
"""In relation to the votes against the replica."""
MOST_CHECKS = 16
"""Rollouts that are looked at in one trial. Without a conviction by then, or with `LEAST_AGAINST` votes in favour, the
replica is acquitted, and not tried for `PAUSE_S`."""
BURST = 16
CHECK_EVERY_S = 15.0
PAUSE_S = 600.0
TRIAL_S = 3600.0
"""A trial that has come to no end by then is over."""
MOST_REMEMBERED = 4096
"""Rollouts that were looked at, and replicas that were acquitted, the last ones."""


class Vote(IntEnum):
    """The word of a rollout about the replica that has made it."""

    IN_FAVOUR = -1
    NOTHING = 0
    """Nothing parts by more than the floor."""
    AGAINST = 1


def votes(sampled: ArrayLike, again: ArrayLike, one: ArrayLike, other: ArrayLike) -> NDArray[np.int8]:
    """The vote of each rollout, as numbers of `Vote`.

    Args:
        sampled: log-probabilities as the replica has sampled them, [..., tokens].
        again: as it scores them.
        one: as one other replica scores them.
        other: as a second one does.
    """
    own, others = (np.asarray(sampled), np.asarray(again)), (np.asarray(one), np.asarray(other))
    within = np.maximum(_mean_size(*own), _mean_size(*others))
    between = np.min([_mean_size(mine, theirs) for mine in own for theirs in others], axis=0)
    parts = (between >= LEAST_SIZE) & (between >= LEAST_FACTOR * within)
    return np.where(parts, Vote.AGAINST, np.where(between < LEAST_SIZE, Vote.NOTHING, Vote.IN_FAVOUR)).astype(np.int8)


def _mean_size(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    sizes: NDArray[np.float64] = np.minimum(sizes_of(one - other), MOST_COUNTED_SIZE).mean(-1)
    return sizes


class MadeRollout(NamedTuple):
    """A rollout that a replica has made."""

    owner: str
    rollout_id: str
    group: str


@dataclass(slots=True)
class _ReplicaTrial:
    """A replica that is suspected."""

    began: float
    groups: set[tuple[str, str]] = field(default_factory=set)
    """By owner and group: those of which a rollout is looked at."""
    votes: list[Vote] = field(default_factory=list)

    @property
    def against(self) -> int:
        return self.votes.count(Vote.AGAINST)

    @property
    def in_favour(self) -> int:
        return self.votes.count(Vote.IN_FAVOUR)

    @property
    def is_convicted(self) -> bool:
        return self.against >= LEAST_AGAINST and self.in_favour <= MOST_IN_FAVOUR * self.against

    @property
    def is_acquitted(self) -> bool:
        return self.in_favour >= LEAST_AGAINST or len(self.votes) >= MOST_CHECKS


class ReplicaTrials:
    """The replicas that are suspected, and what has been seen of each. All times are seconds of any clock."""

    def __init__(self) -> None:
        self._trials: dict[str, _ReplicaTrial] = {}
        self._seen = OrderedDict[tuple[str, str], None]()
        """By owner and id: rollouts that were looked at."""
        self._acquitted = OrderedDict[str, float]()
        """By replica: until when it is not tried."""
        self._due = -PAUSE_S
        """When the next rollout would be looked at, if they were so evenly: `BURST` of them may be so earlier."""

    def to_check(self, replica: str, made: Iterable[MadeRollout], now: float) -> list[MadeRollout]:
        """Which of the rollouts that a suspected replica has made are to be scored now: one of a group."""
        for name in [name for name, trial in self._trials.items() if trial.began + TRIAL_S <= now]:
            self._acquit(name, now)
        if self._acquitted.get(replica, now) > now:
            return []
        trial, chosen = self._trials.get(replica) or _ReplicaTrial(now), list[MadeRollout]()
        for one in made:
            group, rollout = (one.owner, one.group), (one.owner, one.rollout_id)
            if len(trial.groups) >= MOST_CHECKS or self._due - now > (BURST - 1) * CHECK_EVERY_S:
                break
            if group in trial.groups or rollout in self._seen:
                continue
            self._due = max(self._due, now) + CHECK_EVERY_S
            trial.groups.add(group)
            _remember(self._seen, rollout, None)
            chosen.append(one)
        if trial.groups:
            self._trials[replica] = trial
        return chosen

    def vote(self, replica: str, vote: Vote, now: float) -> _ReplicaTrial | None:
        """A rollout of `to_check` says this. Returns the trial if the replica is convicted by it, otherwise `None`."""
        trial = self._trials.get(replica)
        if trial is None:
            return None
        trial.votes.append(vote)
        if trial.is_convicted:
            # Votes on others may be those of the convicted one.
            self._trials.clear()
            self._due = now + PAUSE_S + (BURST - 1) * CHECK_EVERY_S
            return trial
        if trial.is_acquitted:
            self._acquit(replica, now)
        return None

    def _acquit(self, replica: str, now: float) -> None:
        del self._trials[replica]
        _remember(self._acquitted, replica, now + PAUSE_S)


def _remember(remembered: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    remembered[key] = value
    remembered.move_to_end(key)
    if len(remembered) > MOST_REMEMBERED:
        remembered.popitem(last=False)
