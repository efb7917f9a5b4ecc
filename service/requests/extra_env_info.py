"""Refuses samples that their environment cannot take, before anything is generated for them."""

import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from deployments.failures import EnvironmentLost, TurnTimedOut
from deployments.protocols import Environment, RefusedField
from rollout_client.contract import RolloutRequest
from rollout_client.problem_contract import FieldProblem
from service.problems import MOST_PROBLEMS, dotted, invalid_request, shown
from service.rollouts.retries import with_timeout

CHECKED_WITHIN_S = 10.0
logger = logging.getLogger("rollout_service.requests")


async def refuse_bad_extra_env_info(
    request: RolloutRequest, request_id: str, environments: Mapping[str, Environment]
) -> None:
    """Asks each task's environment about its samples. All tasks of the request are known.

    An environment that does not answer refuses nothing: it validates each sample again when it steps it.

    Raises:
        RequestProblem: 422 with the first `MOST_PROBLEMS` fields that an environment refuses.
    """
    positions: defaultdict[str, list[int]] = defaultdict(list)
    for position, sample in enumerate(request.samples):
        positions[sample.task_name].append(position)
    problems: list[FieldProblem] = []
    for task_name, of_task in positions.items():
        extra_env_infos = [request.samples[position].extra_env_info for position in of_task]
        try:
            checked = environments[task_name].refused_fields(extra_env_infos)
            refused = await with_timeout(CHECKED_WITHIN_S, checked, f"The check of the samples by task {task_name!r}")
        except (EnvironmentLost, TurnTimedOut) as error:
            context = {"request_id": request_id, "task_name": task_name}
            logger.warning("The samples of a request were not checked: %s", error, exc_info=error, extra=context)
            continue
        problems += (
            problem_of(task_name, of_task[field.place], extra_env_infos[field.place], field) for field in refused
        )
    if problems:
        raise invalid_request(*problems[:MOST_PROBLEMS])


def problem_of(task_name: str, position: int, extra_env_info: dict[str, Any], refused: RefusedField) -> FieldProblem:
    return FieldProblem(
        field=dotted(("samples", position, "extra_env_info", *refused.location)),
        message=f"{refused.message}; GET /tasks shows the fields of task {task_name!r} and an example",
        value=shown(value_at(extra_env_info, refused.location)),
    )


def value_at(extra_env_info: dict[str, Any], location: tuple[str | int, ...]) -> Any:
    """The value of the field; that of the object around it if the field is missing."""
    value: Any = extra_env_info
    for part in location:
        if isinstance(value, dict) and part not in value:
            return value
        value = value[part]
    return value
