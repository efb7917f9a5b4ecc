"""Which samples and groups `POST /rollout` plays and keeps: ranges of a task's samples, and `keep.where`.

A range names samples that the service takes from a task itself, so that they need not be sent.
"""

import operator
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, model_validator

from rollout_client.contract.base import Lenient, Strict

MOST_SAMPLES_OF_A_RANGE = 65_536
Place = Annotated[int, Field(ge=0, lt=2**53)]
MOST_CHARACTERS_OF_A_REVISION = 64
ShuffleSeed = Annotated[int, Field(ge=0, lt=2**63)]


class PlaceRange(Strict):
    """Places of a data set that follow one another."""

    start: Place
    """The first one."""
    count: Annotated[int, Field(ge=1, le=MOST_SAMPLES_OF_A_RANGE)]
    """How many."""

    @property
    def end(self) -> int:
        """The place after the last one."""
        return self.start + self.count


class SampleRange(Strict):
    """Samples that follow one another in the data of a task, or that its environment makes if it has no data.

    Equal ranges give equal samples.
    """

    task_name: str
    """One of those that `GET /tasks` lists."""
    split: str | None = None
    """A part of the data, such as `validation`; by default the first that `GET /tasks` names."""
    start: Place = 0
    """The place of the first sample. Places count on through all epochs: with 1000 rows, place 1000 is the first of the
    second epoch."""
    count: Annotated[int, Field(ge=1, le=MOST_SAMPLES_OF_A_RANGE)]
    """How many samples."""
    seed: ShuffleSeed | None = None
    """Shuffles every epoch of the data, each in another way; by default as the service's config says. Without data: the
    seed of what the environment makes, by default 0."""
    revision: Annotated[str, Field(max_length=MOST_CHARACTERS_OF_A_REVISION)] | None = None
    """Revision of the data that the range was made for; the request is refused where the service has others now. The
    cursor of a job has it. By default whatever the data are."""
    without: list[PlaceRange] = Field(default=[], max_length=MOST_SAMPLES_OF_A_RANGE // 2, fail_fast=True)
    """Places of the range that are left out, in ascending order: those that were played before. The cursor of a job
    (`GET /jobs/{job_id}/cursor`) has them."""

    @model_validator(mode="after")
    def leaves_out_places_of_its_own_in_order(self) -> Self:
        at = self.start
        for left_out in self.without:
            if left_out.start < at or left_out.end > self.end:
                raise ValueError("without: its places must be of the range, in ascending order, and each there once")
            at = left_out.end
        return self

    @property
    def end(self) -> int:
        """The place after the last one."""
        return self.start + self.count

    @property
    def size(self) -> int:
        """How many samples it has."""
        return self.count - sum(left_out.count for left_out in self.without)


class NextSampleRange(SampleRange):
    """As many samples as a `SampleRange` of the request, from where that one ended."""

    model_config = ConfigDict(extra="allow")


MOST_NAMED_REWARDS = 64
Statistic = Literal["mean", "std"]
COMPARISONS = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le}


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
        bounds = ((name, getattr(self, name), passes) for name, passes in COMPARISONS.items())
        return next((name for name, bound, passes in bounds if bound is not None and not passes(value, bound)), None)


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
