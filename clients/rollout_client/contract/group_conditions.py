"""Conditions of a group that is kept, `keep.where`, and of one that gets further rollouts, `num_generations`."""

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, TypeAdapter, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from rollout_client.contract.base import Lenient, Strict

MOST_NAMED_REWARDS = 64
GroupSize = Annotated[int, Field(ge=1, le=1024)]
size_adapter = TypeAdapter(GroupSize)
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


class GenerationRange(Strict):
    """A group that gets further rollouts only while its pass rate is undecided: while it may teach and does not yet.

    A group begins with `min` rollouts. When all that were started have ended, the Wilson interval of its pass rate
    decides whether as many again are started, up to `max` in all. Failed rollouts and those that were cut off count
    among `max`, and not in the pass rate.
    """

    min: GroupSize
    """Rollouts with which a group begins, and how many are started at a time after them."""
    max: GroupSize
    """Most rollouts of a group."""
    stop: Literal["decided"] = "decided"
    """When a group is complete. `decided`: the interval lies outside of `teaches`; or some of its rollouts have passed
    and some have not, and the interval is at most `width` wide; or it has `max` rollouts; or none of them was played to
    its end."""
    passes_at: float = 1.0
    """A rollout passes with this total reward or a higher one."""
    confidence: float = Field(default=0.95, ge=0.01, le=0.999)
    """Level of the interval."""
    teaches: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=2, max_length=2)] = [0.2, 0.8]  # noqa: RUF012 - pydantic copies it
    """The lowest and the highest pass rate of a group that is worth further rollouts: one whose interval lies below or
    above is too hard or too easy."""
    width: float = Field(default=0.5, gt=0, le=1)
    """A group in which some rollouts passed and some did not goes on until its interval is at most so wide. 1: it is
    complete at once."""

    @model_validator(mode="after")
    def has_its_bounds_in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError("min: it must not be above max")
        if self.teaches[0] > self.teaches[1]:
            raise ValueError("teaches: the first bound must not be above the second")
        return self


def size_or_range(given: object, _: ValidatorFunctionWrapHandler) -> object:
    """By the type of what is given: the errors of a union would name both alternatives."""
    if isinstance(given, dict | GenerationRange):
        return GenerationRange.model_validate(given, strict=True)
    return size_adapter.validate_python(given, strict=True)


Generations = Annotated[GroupSize | GenerationRange, WrapValidator(size_or_range)]
"""The number of rollouts of a group, or the range in which its rewards decide it."""


class GroupCounts(Lenient):
    """The groups of a request with `keep.where` or a range of `num_generations`, which keeps all without `keep.where`.
    All but `ahead` depend on the results alone, not on time."""

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
    rollouts: int | None = None
    """With a range of `num_generations`: rollouts that were started for the groups of `drawn`."""
