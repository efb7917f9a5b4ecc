"""The two protocols over Serve handles: one call of a replica, its failures named."""

import asyncio
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.failures import EnvironmentLost, GenerationLost, RolloutFailure
from deployments.protocols import (
    Generation,
    GenerationRequest,
    GeneratorDescription,
    StepOutcome,
    StepRequest,
    TaskDescription,
)


async def answer_of(response: Any, lost: type[RolloutFailure], who: str) -> Any:
    """Awaits a handle call and names what broke it; cancelling the wait cancels the call.

    Raises:
        RolloutFailure: `lost` if the replica or the way to it broke.
        Exception: what the replica itself raised, as it raised it.
    """
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
    except RayTaskError as error:
        raise error.cause from error
    except RayActorError as error:
        raise lost(f"{who} died during the call.") from error
    except (RayError, RayServeException) as error:
        raise lost(f"{who} could not be reached: {error}") from error


class GeneratorHop:
    """The `Generator` protocol, on whichever generator replica Serve picks."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def generate(self, request: GenerationRequest) -> Generation:
        generation: Generation = await answer_of(
            self._handle.generate.remote(request), GenerationLost, "The generator replica"
        )
        return generation

    async def describe(self) -> GeneratorDescription:
        description: GeneratorDescription = await answer_of(
            self._handle.describe.remote(), GenerationLost, "The generator replica"
        )
        return description


class EnvironmentHop:
    """The `Environment` protocol, on whichever replica of the task Serve picks."""

    def __init__(self, task_name: str, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._who = f"The replica of environment {task_name!r}"

    async def step(self, request: StepRequest) -> StepOutcome:
        [answer] = await self._answer(self._handle.step.remote([request]))
        if isinstance(answer, RolloutFailure):
            raise answer
        outcome: StepOutcome = answer
        return outcome

    async def describe(self) -> TaskDescription:
        description: TaskDescription = await self._answer(self._handle.describe.remote())
        return description

    async def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        samples: list[dict[str, Any]] = await self._answer(self._handle.example_samples.remote(count, seed))
        return samples

    async def _answer(self, response: Any) -> Any:
        return await answer_of(response, EnvironmentLost, self._who)
