"""What a request's environments say of their tasks: it must be known before prompts are rendered."""

import logging
from collections.abc import Mapping

from deployments.failures import EnvironmentLost, RolloutFailure, TurnTimedOut
from deployments.protocols import Environment, TaskDescription
from rollout_client.contract import RolloutRequest
from service.rollouts.retries import with_timeout

DESCRIBED_WITHIN_S = 10.0
TaskDescriptions = Mapping[str, TaskDescription | RolloutFailure]
"""By task name."""
logger = logging.getLogger("rollout_service.requests")


async def task_descriptions(
    request: RolloutRequest, request_id: str, environments: Mapping[str, Environment]
) -> TaskDescriptions:
    """Those of the request's tasks that exist. A failure is that of an environment that does not answer."""
    descriptions: dict[str, TaskDescription | RolloutFailure] = {}
    for task_name in {sample.task_name for sample in request.samples} & environments.keys():
        described = environments[task_name].known_description()
        try:
            who = f"The description of task {task_name!r}"
            descriptions[task_name] = await with_timeout(DESCRIBED_WITHIN_S, described, who)
        except (EnvironmentLost, TurnTimedOut) as error:
            context = {"request_id": request_id, "task_name": task_name}
            logger.warning("Task %s has not described itself: %s", task_name, error, exc_info=error, extra=context)
            descriptions[task_name] = error
    return descriptions


def tasks_with_start(descriptions: TaskDescriptions) -> frozenset[str]:
    """The tasks whose environments start their samples."""
    return frozenset(
        name for name, task in descriptions.items() if isinstance(task, TaskDescription) and task.has_start
    )
