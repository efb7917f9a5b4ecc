"""The conditions of a group that is kept, `keep.where`, and the counts of those that were judged by them."""

from typing import Literal, NamedTuple

from pydantic import Field

from rollout_client.contract.base import Lenient, Strict

MOST_NAMED_REWARDS = 64
Statistic = Literal["mean", "std"]


class Bounds(Strict):
    """Bounds of a number; one that breaks none of them passes."""

    gt: float | None = None
    """Above this."""
    ge: float | None = None
    """At least this."""
    lt: float | None = None
    """Below this."""
    le: float | None = None
    """At most this."""

    def broken_by(self, value: float) -> str | None:
        """The name of the first bound that `value` breaks; `None` if it passes."""
        if self.gt is not None and not value > self.gt:
            return "gt"
        if self.ge is not None and not value >= self.ge:
            return "ge"
        if self.lt is not None and not value < self.lt:
            return "lt"
        return "le" if self.le is not None and not value <= self.le else None


class RewardConditions(Strict):
    """Conditions of one named reward, over the rollouts of a group that have it."""

    mean: Bounds | None = None
    """Its mean."""
    std: Bounds | None = None
    """Its standard deviation, with n degrees of freedom: exactly 0 where all are equal."""


class Condition(NamedTuple):
    """A statistic of a group's rewards, and its bounds."""

    path: str
    """Its field in `where`."""
    reward: str | None
    """The name of the reward; `None` for `total_reward`."""
    statistic: Statistic
    bounds: Bounds


class GroupConditions(Strict):
    """Conditions of a group, all of which must hold, over its rollouts that were played to their end."""

    reward_mean: Bounds | None = None
    """The mean of `total_reward`: `{"gt": 0, "lt": 1}` drops a sample that is always, and one that is never solved."""
    reward_std: Bounds | None = None
    """The standard deviation of `total_reward`, with n degrees of freedom. `{"gt": 0}` drops groups whose rewards are
    all equal: their advantages are all 0."""
    rewards: dict[str, RewardConditions] = Field(default={}, max_length=MOST_NAMED_REWARDS)
    """Conditions of rewards that the environment named, by name."""

    def conditions(self) -> list[Condition]:
        """The statistics that are bounded, in the order in which they are judged."""
        given: list[tuple[str, str | None, Statistic, Bounds | None]] = [
            ("reward_mean", None, "mean", self.reward_mean),
            ("reward_std", None, "std", self.reward_std),
        ]
        for name, of_reward in self.rewards.items():
            given.append((f"rewards.{name}.mean", name, "mean", of_reward.mean))
            given.append((f"rewards.{name}.std", name, "std", of_reward.std))
        return [Condition(path, name, kind, bounds) for path, name, kind, bounds in given if bounds is not None]


class GroupCounts(Lenient):
    """The groups of a request with `keep.where`. All but `ahead` depend on the results alone, not on time."""

    drawn: int
    """Samples up to the one whose group was the last that had to be judged: `kept` and `dropped` together."""
    kept: int
    """Groups in the answer."""
    dropped: dict[str, int] = {}  # noqa: RUF012 - pydantic copies it
    """Groups that are not, by the first condition that each fails, such as `reward_std.gt`. `not_full`: fewer of its
    rollouts than `keep.per_group` asks for, by default all, have ended without error. `rewards.NAME.missing`: no
    rollout has the reward."""
    ahead: int
    """Further groups that were begun ahead and were not needed. `next_samples_from` begins with their samples."""
