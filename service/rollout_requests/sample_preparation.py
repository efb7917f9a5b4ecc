"""Asks the environments of a request about its samples, before prompts are rendered and anything is generated.

Each task describes itself; its environment refuses samples that it cannot take; where it makes a first observation or
state, it starts them.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from deployments.failures import EnvironmentLost, RolloutFailure, TurnTimedOut
from deployments.protocols.chat import chat_message
from deployments.protocols.environments import RefusedField, StepRequest, TaskDescription
from deployments.protocols.generation import Environment
from rollout_client.contract.base import FieldProblem
from rollout_client.contract.messages import PromptMessage
from rollout_client.contract.rollouts import RolloutRequest, SampleInput
from rollout_env import ChatMessage, StepOutcome
from service.problems import MOST_PROBLEMS, dotted, invalid_request
from service.rollouts.progress import ProgressLog
from service.rollouts.retries import RetryBudget, with_retries, with_timeout

ANSWERED_WITHIN_S = 10.0
Answer = TypeVar("Answer")
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
        checked = environments[task_name].refused_fields(extra_env_infos)
        refused = await _answer(checked, "The check of the samples", task_name, request_id)
        if not isinstance(refused, RolloutFailure):
            problems += (_problem_of(task_name, of_task[field.place], field) for field in refused)
    if problems:
        raise invalid_request(*problems[:MOST_PROBLEMS])


def _problem_of(task_name: str, position: int, refused: RefusedField) -> FieldProblem:
    return FieldProblem(
        field=dotted(("samples", position, "extra_env_info", *refused.location)),
        message=f"{refused.message}; GET /tasks shows the fields of task {task_name!r} and an example",
    )


TaskDescriptions = Mapping[str, TaskDescription | RolloutFailure]
"""By task name."""


async def task_descriptions(
    request: RolloutRequest, request_id: str, environments: Mapping[str, Environment]
) -> TaskDescriptions:
    """The descriptions of the request's tasks that exist, or the failures of environments that do not answer."""
    descriptions: dict[str, TaskDescription | RolloutFailure] = {}
    for task_name in {sample.task_name for sample in request.samples} & environments.keys():
        described = environments[task_name].known_description()
        descriptions[task_name] = await _answer(described, "The description", task_name, request_id)
    return descriptions


async def _answer(call: Awaitable[Answer], what: str, task_name: str, request_id: str) -> Answer | RolloutFailure:
    """The answer of an environment, or its failure, which is logged."""
    try:
        return await with_timeout(ANSWERED_WITHIN_S, call, f"{what} by task {task_name!r}")
    except (EnvironmentLost, TurnTimedOut) as error:
        context = {"request_id": request_id, "task_name": task_name}
        logger.warning("An environment did not answer: %s", error, exc_info=error, extra=context)
        return error


def tasks_with_start(descriptions: TaskDescriptions) -> frozenset[str]:
    """The tasks whose environments start their samples."""
    return frozenset(
        name for name, task in descriptions.items() if isinstance(task, TaskDescription) and task.has_start
    )


async def start_samples(
    request: RolloutRequest,
    request_id: str,
    task_names: Set[str],
    environments: Mapping[str, Environment],
    progress: ProgressLog | None = None,
    places: Iterable[int] | None = None,
    owner: str | None = None,
) -> dict[int, RolloutFailure]:
    """Starts all samples of these tasks at once, and puts the started ones in their places in the request.

    A sample with a `message_log`, or in `progress`, was started before. Cancelling this cancels all starts.

    Args:
        places: starts the samples at these positions alone; by default all.
        owner: the name of the key of the request; `None` where nobody needs one.

    Returns:
        The failures by position in the request; their samples are unchanged.
    """
    unique_id = uuid4().hex
    started_before = {} if progress is None else progress.started
    places = range(len(request.samples)) if places is None else places
    for position in started_before.keys() & set(places):
        request.samples[position] = started_before[position]
    starts: dict[int, asyncio.Task[StepOutcome | RolloutFailure]] = {}
    async with asyncio.TaskGroup() as group:
        for position in places:
            sample = request.samples[position]
            is_due = sample.message_log is None and position not in started_before
            if sample.task_name in task_names and is_due:
                idx = position if sample.idx is None else sample.idx
                step = StepRequest(
                    [chat_message(message) for message in sample.messages or ()],
                    sample.extra_env_info,
                    request_id=request_id,
                    sample=idx,
                    step_id=f"{unique_id}-{position}-start",
                    owner=owner,
                )
                start = partial(environments[sample.task_name].start, step)
                log_fields = {"request_id": request_id, "task_name": sample.task_name, "sample": idx}
                starts[position] = group.create_task(outcome_of(start, RetryBudget(log_fields, request.retries)))
    failures: dict[int, RolloutFailure] = {}
    for position, task in starts.items():
        outcome = task.result()
        if isinstance(outcome, RolloutFailure):
            failures[position] = outcome
        else:
            request.samples[position] = _started(request.samples[position], outcome)
    if progress is not None and (now_started := starts.keys() - failures.keys()):
        await progress.note_started({position: request.samples[position] for position in now_started})
    return failures


async def outcome_of(call: Callable[[], Awaitable[Answer]], retries: RetryBudget) -> Answer | RolloutFailure:
    """The result of a call that is retried, or its last failure."""
    try:
        return await with_retries(call, retries)
    except RolloutFailure as failure:
        return failure


def _started(sample: SampleInput, outcome: StepOutcome) -> SampleInput:
    """The sample with the additions of its environment."""
    added = [PromptMessage.model_validate(_shown_message(message)) for message in outcome.observations]
    update: dict[str, Any] = {"messages": [*(sample.messages or ()), *added]}
    if outcome.metadata is not None:
        update["extra_env_info"] = outcome.metadata
    if outcome.next_stop_strings is not None:
        update["stop_strings"] = outcome.next_stop_strings
    return sample.model_copy(update=update)


def _shown_message(message: ChatMessage) -> dict[str, Any]:
    """The message as a prompt's: its images are parts of its content, before its text."""
    fields: dict[str, Any] = {**message}
    if images := fields.pop("images", None):
        text = [{"type": "text", "text": message["content"]}] if message["content"] else []
        fields["content"] = [*({"type": "image", "image": name} for name in images), *text]
    return fields
