"""Finds the problems of `keep`: early stopping that cannot happen, and conditions that no group can meet. No I/O."""

from collections.abc import Iterator

from rollout_client.contract.group_conditions import Bounds, Condition
from rollout_client.contract.problems import FieldProblem
from rollout_client.contract.rollouts import DRAWN_PER_GROUP, Keep, RolloutRequest

DRAW_AT_MOST = "keep.draw_at_most"


def keep_problems(request: RolloutRequest) -> Iterator[FieldProblem]:
    keep, samples = request.keep, request.sample_count
    if (keep.per_group or 0) > request.num_generations:
        yield FieldProblem(
            field="keep.per_group",
            message=f"a group has only {request.num_generations} rollouts; keep fewer or raise num_generations",
            value=keep.per_group,
        )
    if keep.where is not None:
        yield from where_problems(request)
        return
    if (keep.groups or 0) > samples:
        yield FieldProblem(
            field="keep.groups",
            message=f"there are only {samples} groups, one per sample; keep fewer",
            value=keep.groups,
        )
    if keep.draw_at_most is not None:
        message = "it bounds what keep.where draws, and there is no where; give one, or leave draw_at_most out"
        yield FieldProblem(field=DRAW_AT_MOST, message=message, value=keep.draw_at_most)


def draws_problem(request: RolloutRequest, max_rollouts: int) -> FieldProblem | None:
    """The problem of a request that may draw more rollouts than a request may have, if it may."""
    drawn, size = request.sample_count, request.num_generations
    if drawn * size <= max_rollouts:
        return None
    by_default = "" if request.keep.draw_at_most else f", {DRAWN_PER_GROUP} for each of keep.groups by default,"
    message = (
        f"{drawn} samples{by_default} x {size} generations are more than {max_rollouts} rollouts; draw at most "
        f"{max_rollouts // size}"
    )
    return FieldProblem(field=DRAW_AT_MOST, message=message, value=request.keep.draw_at_most)


def where_problems(request: RolloutRequest) -> Iterator[FieldProblem]:
    """The problems of a request that selects groups."""
    keep = request.keep
    if keep.groups is None:
        message = "it is missing, and keep.where draws samples until so many groups are kept; send it"
        yield FieldProblem(field="keep.groups", message=message)
    else:
        yield from draw_problems(request, keep, keep.groups)
    if request.schedule == "lockstep":
        message = "keep.where draws further groups while others play, which have no turns in lockstep; choose async"
        yield FieldProblem(field="schedule", message=message, value=request.schedule)
    assert keep.where is not None
    conditions = keep.where.conditions()
    if not conditions:
        message = 'it has no condition, so every group passes; give one, such as {"reward_std": {"gt": 0}}'
        yield FieldProblem(field="keep.where", message=message)
    for condition in conditions:
        yield from bounds_problems(f"keep.where.{condition.path}", condition, keep.per_group or request.num_generations)


def draw_problems(request: RolloutRequest, keep: Keep, groups: int) -> Iterator[FieldProblem]:
    if keep.draw_at_most is not None and keep.draw_at_most < groups:
        message = f"keep.groups asks for {groups} groups, one per sample; draw at least as many, or keep fewer"
        yield FieldProblem(field=DRAW_AT_MOST, message=message, value=keep.draw_at_most)
    if not request.samples_from and len(request.samples) < groups:
        message = f"there are only {len(request.samples)} groups, one per sample; keep fewer, or send samples_from"
        yield FieldProblem(field="keep.groups", message=message, value=groups)
    if not request.samples_from and (keep.draw_at_most or 0) > len(request.samples):
        message = f"there are only {len(request.samples)} samples; draw fewer, or send samples_from"
        yield FieldProblem(field=DRAW_AT_MOST, message=message, value=keep.draw_at_most)


def bounds_problems(field: str, condition: Condition, group_size: int) -> Iterator[FieldProblem]:
    bounds = condition.bounds
    value = bounds.model_dump(exclude_none=True)
    if not value:
        yield FieldProblem(field=field, message="it has no bound; give one of gt, ge, lt, le", value=value)
    for one, other in (("gt", "ge"), ("lt", "le")):
        if one in value and other in value:
            yield FieldProblem(field=field, message=f"{one} and {other} are both given; send one of them", value=value)
    if is_empty(bounds, condition.statistic == "std"):
        least = ", and a standard deviation is at least 0" if condition.statistic == "std" else ""
        message = f"no number is within these bounds{least}; every group would be dropped"
        yield FieldProblem(field=field, message=message, value=value)
    elif condition.statistic == "std" and group_size == 1 and bounds.broken_by(0.0) is not None:
        message = "groups of one rollout have no spread, so all would be dropped; raise num_generations and per_group"
        yield FieldProblem(field=field, message=message, value=value)


def is_empty(bounds: Bounds, is_at_least_0: bool) -> bool:
    """Whether no number is within the bounds."""
    lower = [bound for bound in (bounds.gt, bounds.ge, 0.0 if is_at_least_0 else None) if bound is not None]
    upper = [bound for bound in (bounds.lt, bounds.le) if bound is not None]
    if not (lower and upper):
        return False
    lowest, highest = max(lower), min(upper)
    # Where both are one number, it is the only one that could pass.
    return lowest > highest or (lowest == highest and bounds.broken_by(lowest) is not None)
