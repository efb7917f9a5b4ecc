"""Who has which rank in a weight transfer: the trainer is rank 0, and each worker of each replica has one of its own.

In all functions, `workers` are the numbers of workers of the replicas, in the order in which they registered.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.policy.failures import TransferRefused
from rollout_client.problem_contract import FieldProblem

TRAINER_RANKS = 1
UpdateInfo = dict[str, Any] | list[dict[str, Any]]


def world_size(workers: Sequence[int]) -> int:
    """How many processes take part."""
    return TRAINER_RANKS + sum(workers)


def rank_offsets(workers: Sequence[int]) -> list[int]:
    """The first rank of each replica."""
    return [TRAINER_RANKS + sum(workers[:position]) for position in range(len(workers))]


def shares(update_info: UpdateInfo, workers: Sequence[int]) -> list[UpdateInfo]:
    """What each replica is told: all the same, or, of a list with one entry for each worker, the entries of its own.

    Raises:
        TransferRefused: the list does not have one entry for each worker.
    """
    if not isinstance(update_info, list):
        return [update_info] * len(workers)
    if len(update_info) != sum(workers):
        raise refused("update_info", f"{sum(workers)} workers take part, one entry each", len(update_info))
    ends = [sum(workers[: position + 1]) for position in range(len(workers))]
    return [update_info[end - count : end] for end, count in zip(ends, workers, strict=True)]


def refuse_wrong_world_size(init_info: Mapping[str, Any], workers: Sequence[int]) -> None:
    """Raises `TransferRefused` if there is no replica, or the trainer expects another number of processes."""
    if not workers:
        raise refused("transfer", "no replica is there yet; wait until the service is ready")
    expected = world_size(workers)
    if init_info.get("world_size") != expected:
        message = f"{expected} processes take part: the trainer's one and {expected - 1} of the replicas"
        raise refused("init_info.world_size", message, init_info.get("world_size"))


def refused(field: str, message: str, value: Any = None) -> TransferRefused:
    return TransferRefused(FieldProblem(field=field, message=message, value=value))
