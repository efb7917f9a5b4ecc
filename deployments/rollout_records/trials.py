"""Which generator replica computes other log-probabilities than its siblings, as a state machine without I/O.

Of a rollout that is looked at there are four computations of the same tokens: the replica has sampled them and scores
them again, and two others score them. All four differ by rounding, which depends on the prompt and on how a token is
computed; only within one rollout is it the same for all. The replica parts if its two differ from both of the others by
a multiple of what either pair differs by itself, and by more than a floor.

Guarantees: a replica is convicted by such votes alone, of at least `LEAST_AGAINST` rollouts of as many groups; who
suspects it, and how often, chooses only what is looked at. A rollout is looked at once, and of a replica at most
`MOST_CHECKS` in `TRIAL_S`; after a conviction none of any for as long.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from math import log
from typing import NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deployments.rollout_records.comparison import MOST_COUNTED, sizes_of

Key = TypeVar("Key")
Value = TypeVar("Value")
LEAST_SIZE = 0.05
"""A replica does not part if its tokens differ by less than this on average, a ratio of 1.05. bfloat16 makes 0.02."""
LEAST_FACTOR = 2.0
"""Between what parts a replica from two others, and what its own two computations, or theirs, differ by."""
LEAST_TOKENS = 8
"""Fewer tokens of a rollout say nothing: by chance alone, one in some may look like a replica that parts."""
LEAST_AGAINST = 4
"""Votes that convict a replica, if they are three times as many as those in its favour, which must be fewer than
this."""
MOST_CHECKS = 16
TRIAL_S = 900.0
MOST_REMEMBERED = 4096
"""Rollouts that were looked at, the last ones."""


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
    return cast(NDArray[np.float64], np.minimum(sizes_of(one - other), log(MOST_COUNTED)).mean(-1))


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
    def is_convicted(self) -> bool:
        against, in_favour = self.votes.count(Vote.AGAINST), self.votes.count(Vote.IN_FAVOUR)
        is_clear = against >= max(LEAST_AGAINST, 3 * in_favour) and in_favour < LEAST_AGAINST
        return is_clear and len(self.votes) <= MOST_CHECKS


class ReplicaTrials:
    """The replicas that are suspected, and what has been seen of each. All times are seconds of any clock."""

    def __init__(self) -> None:
        self._trials: dict[str, _ReplicaTrial] = {}
        self._seen: dict[tuple[str, str], None] = {}
        """By owner and id: rollouts that were looked at."""
        self._paused_until = -TRIAL_S

    def to_check(self, replica: str, made: Iterable[MadeRollout], now: float) -> list[MadeRollout]:
        """Which of the rollouts that a suspected replica has made are to be scored now: one of a group."""
        self._trials = {name: trial for name, trial in self._trials.items() if now < trial.began + TRIAL_S}
        if now < self._paused_until:
            return []
        trial, chosen = self._trials.setdefault(replica, _ReplicaTrial(now)), list[MadeRollout]()
        for one in made:
            group, rollout = (one.owner, one.group), (one.owner, one.rollout_id)
            if len(trial.groups) < MOST_CHECKS and group not in trial.groups and rollout not in self._seen:
                trial.groups.add(group)
                keep_newest(self._seen, rollout, None, MOST_REMEMBERED)
                chosen.append(one)
        return chosen

    def vote(self, replica: str, vote: Vote, now: float) -> str | None:
        """A rollout of `to_check` says this. Returns why the replica is at fault, if it is convicted by it."""
        if (trial := self._trials.get(replica)) is None:
            return None
        trial.votes.append(vote)
        if not trial.is_convicted:
            return None
        # Votes on others may be those of the convicted one.
        self._trials.clear()
        self._paused_until = now + TRIAL_S
        return (
            f"Generator replica {replica} computes other log-probabilities than its siblings: of {len(trial.votes)} "
            f"rollouts that it and two others have scored again, {trial.votes.count(Vote.AGAINST)} say so."
        )


def keep_newest(kept: dict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Sets a value as the newest of a dict, which loses its oldest beyond `most`."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > most:
        del kept[next(iter(kept))]
