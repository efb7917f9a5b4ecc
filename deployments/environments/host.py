"""The environment deployment: hosts one task and answers batches of its steps."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import fields
from typing import Any

from pydantic import BaseModel, ImportString, TypeAdapter, ValidationError

from deployments.environments.environment import TaskEnvironment
from deployments.failures import EnvironmentBroken, EnvironmentRejected, RolloutFailure
from deployments.protocols import StepOutcome, StepRequest, TaskDescription
from deployments.rpc.autoscaling import stats_of
from deployments.rpc.batching import BatchResults, results_as_completed

OUTCOME = TypeAdapter(StepOutcome)
CANCELLED = EnvironmentBroken("The environment cancelled its own step.")


class EnvironmentHost:
    """One replica of one task's environment; keeps nothing of a sample between its turns."""

    def __init__(self, task_name: str, import_path: str, arguments: dict[str, Any]) -> None:
        self._task_name = task_name
        self._environment = load_environment(import_path, arguments)
        self._under_way = 0

    async def step(self, requests: list[StepRequest]) -> AsyncGenerator[BatchResults[StepOutcome], None]:
        """Steps each sample on its own and yields answers as they finish, those of one instant together.

        One that fails is answered by its failure, beside its siblings' outcomes.
        """
        steps = [step_or_failure(self._environment, request) for request in requests]
        unanswered = len(steps)
        self._under_way += unanswered
        try:
            async with aclosing(results_as_completed(steps, CANCELLED)) as finished:
                async for answers in finished:
                    unanswered -= len(answers)
                    self._under_way -= len(answers)
                    yield answers
        finally:
            self._under_way -= unanswered

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return stats_of(self._under_way)

    async def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [{**sample, "task_name": self._task_name} for sample in self._environment.example_samples(count, seed)]

    async def describe(self) -> TaskDescription:
        return TaskDescription(
            task_name=self._task_name,
            description=self._environment.description,
            fields=self._environment.ExtraEnvInfo.model_json_schema(),
            example=(await self.example_samples(1, 0))[0],
        )

    def __del__(self) -> None:
        if environment := getattr(self, "_environment", None):
            environment.close()


def load_environment(import_path: str, arguments: dict[str, Any]) -> TaskEnvironment:
    """Makes the environment at `package.module:Class`.

    Raises:
        ValidationError: nothing can be imported from there.
        TypeError: it is no `TaskEnvironment`, or does not take the arguments.
    """
    environment_class = TypeAdapter(ImportString[Any]).validate_python(import_path)
    if not (isinstance(environment_class, type) and issubclass(environment_class, TaskEnvironment)):
        raise TypeError(f"{import_path} is not a TaskEnvironment.")
    return environment_class(**arguments)


async def step_or_failure(environment: TaskEnvironment, request: StepRequest) -> StepOutcome | RolloutFailure:
    try:
        extra_env_info = validated(environment, request.extra_env_info)
        return checked(await environment.step(request.message_log, extra_env_info))
    except RolloutFailure as failure:
        # A class of the environment's own may not exist where this is read.
        return failure if type(failure).__module__ == RolloutFailure.__module__ else EnvironmentBroken(str(failure))
    except Exception as error:  # noqa: BLE001 - whatever an environment raises is data of one sample
        return EnvironmentBroken(f"The environment raised {type(error).__name__}: {error}")


def validated(environment: TaskEnvironment, extra_env_info: dict[str, Any]) -> BaseModel:
    try:
        return environment.ExtraEnvInfo.model_validate(extra_env_info)
    except ValidationError as error:
        problems = fields_in(error, "extra_env_info")
        raise EnvironmentRejected(f"The environment cannot take this sample: {problems}.") from error


def checked(outcome: StepOutcome) -> StepOutcome:
    """The outcome, if all of it can travel to the trainer."""
    try:
        return OUTCOME.validate_python({field.name: getattr(outcome, field.name) for field in fields(outcome)})
    except ValidationError as error:
        raise EnvironmentBroken(f"The environment's outcome is not valid: {fields_in(error, 'outcome')}.") from error


def fields_in(error: ValidationError, whole: str) -> str:
    return "; ".join(f"{'.'.join((whole, *map(str, problem['loc'])))}: {problem['msg']}" for problem in error.errors())
