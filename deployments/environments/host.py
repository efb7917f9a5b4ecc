"""The environment deployment: hosts one task and answers batches of its steps."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from deployments import logs
from deployments.environments.loading import load_environment
from deployments.failures import EnvironmentBroken, EnvironmentRejected, RolloutFailure
from deployments.protocols import StepRequest, TaskDescription
from deployments.rpc.autoscaling import stats_of
from deployments.rpc.batching import BatchResults, results_as_completed
from rollout_env import OutcomeInvalid, SampleRejected, StepOutcome
from rollout_env.validation import validated_step

CANCELLED = EnvironmentBroken("The environment cancelled its own step.")
logger = logging.getLogger("rollout_service.environments")


class EnvironmentHost:
    """One replica of one task's environment. Keeps no state of a rollout between its steps."""

    def __init__(self, task_name: str, import_path: str, arguments: dict[str, Any]) -> None:
        """Raises `EnvironmentNotLoadable` if the environment cannot be made."""
        logs.configure()
        self._task_name = task_name
        self._environment = load_environment(import_path, arguments)
        self._steps_in_progress = 0

    async def step(self, requests: list[StepRequest]) -> AsyncGenerator[BatchResults[StepOutcome], None]:
        """Runs all steps at once and yields results as they finish, those of one event-loop iteration in one batch.

        A step that fails yields its failure and does not affect the other steps.
        """
        # Thousands of steps that fail alike leave one traceback in the log, and a line each.
        shown: set[str] = set()
        steps = [self._step(request, shown) for request in requests]
        unanswered = len(steps)
        self._steps_in_progress += unanswered
        try:
            async with aclosing(results_as_completed(steps, CANCELLED)) as finished:
                async for results in finished:
                    unanswered -= len(results)
                    self._steps_in_progress -= len(results)
                    yield results
        finally:
            self._steps_in_progress -= unanswered

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return stats_of(self._steps_in_progress)

    async def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """The environment's example samples, with their `task_name`. Raises what the environment raises."""
        try:
            samples = self._environment.example_samples(count, seed)
            return [{**sample, "task_name": self._task_name} for sample in samples]
        except Exception as error:
            logger.warning(
                "Task %s made no example samples.",
                self._task_name,
                exc_info=error,
                extra={"task_name": self._task_name},
            )
            raise

    async def describe(self) -> TaskDescription:
        return TaskDescription(
            task_name=self._task_name,
            description=self._environment.description,
            fields=self._environment.ExtraEnvInfo.model_json_schema(),
            example=(await self.example_samples(1, 0))[0],
        )

    async def _step(self, request: StepRequest, shown: set[str]) -> StepOutcome | RolloutFailure:
        try:
            return await validated_step(self._environment, request.message_log, request.extra_env_info)
        except asyncio.CancelledError as error:
            if was_cancelled_from_outside():
                raise
            return self._logged(CANCELLED, error, request, shown)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - all that an environment raises fails one sample, SystemExit too
            return self._logged(failure_of_step(error), error, request, shown)

    def _logged(
        self, failure: RolloutFailure, error: BaseException, request: StepRequest, shown: set[str]
    ) -> RolloutFailure:
        traceback_of = None if str(failure) in shown else error
        shown.add(str(failure))
        context = {
            "request_id": request.request_id,
            "rollout_id": request.rollout_id,
            "task_name": self._task_name,
            "sample": request.sample,
        }
        logger.warning("A step of task %s failed: %s", self._task_name, failure, exc_info=traceback_of, extra=context)
        return failure

    def __del__(self) -> None:
        environment = getattr(self, "_environment", None)
        if environment is None:
            return
        try:
            environment.close()
        except Exception as error:
            context = {"task_name": self._task_name}
            logger.warning("The environment of task %s was not closed.", self._task_name, exc_info=error, extra=context)


def failure_of_step(error: BaseException) -> RolloutFailure:
    """Names what an environment raised. Its message goes to the trainer; the traceback goes to the log only."""
    match error:
        case SampleRejected():
            return EnvironmentRejected(str(error))
        case OutcomeInvalid():
            return EnvironmentBroken(str(error))
        # A class of the environment's own may not be importable where the failure is unpickled.
        case RolloutFailure() if type(error).__module__ == RolloutFailure.__module__:
            return error
        case _:
            return EnvironmentBroken(f"The environment raised {type(error).__name__}: {error}")


def was_cancelled_from_outside() -> bool:
    """Whether the running task was asked to end, as opposed to its own code raising `CancelledError`."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
