"""Starts the samples of tasks whose environments make a first observation or state, before prompts are rendered."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from deployments.chat.messages import chat_message
from deployments.failures import RolloutFailure
from deployments.protocols import Environment, StepRequest
from rollout_client.contract import PromptMessage, RolloutRequest, SampleInput
from rollout_env import StepOutcome
from service.rollouts.episode_state import ProgressLog
from service.rollouts.retries import with_retries


@dataclass(slots=True)
class StartIdentity:
    """The sample for which a start is retried."""

    request_id: str
    task_name: str
    sample: int

    def log_fields(self) -> dict[str, Any]:
        return {"request_id": self.request_id, "task_name": self.task_name, "sample": self.sample}


@dataclass(slots=True)
class StartRetries:
    """Pays for the retries of one start."""

    identity: StartIdentity
    retries_left: int

    def take_retry(self) -> bool:
        self.retries_left -= 1
        return self.retries_left >= 0


async def start_samples(
    request: RolloutRequest,
    request_id: str,
    task_names: Set[str],
    environments: Mapping[str, Environment],
    progress: ProgressLog | None = None,
) -> dict[int, RolloutFailure]:
    """Starts all samples of these tasks at once, and puts the started ones in their places in the request.

    A sample with a `message_log`, or in `progress`, was started before. Cancelling this cancels all starts.

    Returns:
        the failures, by position in the request; their samples are as they were.
    """
    unique_id = uuid4().hex
    started_before = {} if progress is None else progress.started
    for position, sample in started_before.items():
        request.samples[position] = sample
    starts: dict[int, asyncio.Task[StepOutcome | RolloutFailure]] = {}
    async with asyncio.TaskGroup() as group:
        for position, sample in enumerate(request.samples):
            is_due = sample.message_log is None and position not in started_before
            if sample.task_name in task_names and is_due:
                idx = position if sample.idx is None else sample.idx
                step = StepRequest(
                    [chat_message(message) for message in sample.messages or ()],
                    sample.extra_env_info,
                    request_id=request_id,
                    sample=idx,
                    step_id=f"{unique_id}-{position}-start",
                )
                start = partial(environments[sample.task_name].start, step)
                identity = StartIdentity(request_id, sample.task_name, idx)
                starts[position] = group.create_task(outcome_of(start, StartRetries(identity, request.retries)))
    failures: dict[int, RolloutFailure] = {}
    for position, task in starts.items():
        outcome = task.result()
        if isinstance(outcome, RolloutFailure):
            failures[position] = outcome
        else:
            request.samples[position] = started(request.samples[position], outcome)
    if progress is not None and (now_started := starts.keys() - failures.keys()):
        await progress.note_started({position: request.samples[position] for position in now_started})
    return failures


async def outcome_of(
    start: Callable[[], Awaitable[StepOutcome]], retries: StartRetries
) -> StepOutcome | RolloutFailure:
    try:
        return await with_retries(start, retries)
    except RolloutFailure as failure:
        return failure


def started(sample: SampleInput, outcome: StepOutcome) -> SampleInput:
    """The sample with what its environment adds to it."""
    added = [PromptMessage.model_validate(message) for message in outcome.observations]
    update: dict[str, Any] = {"messages": [*(sample.messages or ()), *added]}
    if outcome.metadata is not None:
        update["extra_env_info"] = outcome.metadata
    if outcome.next_stop_strings is not None:
        update["stop_strings"] = outcome.next_stop_strings
    return sample.model_copy(update=update)
