"""The two protocols over Serve handles: one call of a replica, its failures named."""

import asyncio
from typing import Any

from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.failures import EnvironmentLost, GenerationLost
from deployments.handle_calls import answer_of
from deployments.protocols import (
    Generation,
    GenerationRequest,
    GeneratorDescription,
    StepOutcome,
    StepRequest,
    TaskDescription,
)


def settle(waiting: "asyncio.Future[StepOutcome]", answer: StepOutcome | Exception) -> None:
    if waiting.done():
        return
    if isinstance(answer, Exception):
        waiting.set_exception(answer)
    else:
        waiting.set_result(answer)


AskedStep = tuple[StepRequest, "asyncio.Future[StepOutcome]"]


class GeneratorHop:
    """The `Generator` protocol, on whichever generator replica Serve picks."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def generate(self, request: GenerationRequest) -> Generation:
        generation: Generation = await self._answer(self._handle.generate.remote(request))
        return generation

    async def describe(self) -> GeneratorDescription:
        description: GeneratorDescription = await self._answer(self._handle.describe.remote())
        return description

    async def _answer(self, response: Any) -> Any:
        return await answer_of(response, response, GenerationLost, "The generator replica")


class EnvironmentHop:
    """The `Environment` protocol, on whichever replica of the task Serve picks."""

    def __init__(self, task_name: str, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._asked_now: list[AskedStep] = []
        self._calls: set[asyncio.Task[None]] = set()
        self._who = f"The replica of environment {task_name!r}"

    async def step(self, request: StepRequest) -> StepOutcome:
        """Travels in one call with the steps that are asked for in the same instant."""
        if not self._asked_now:
            asyncio.get_running_loop().call_soon(self._send)
        answer: asyncio.Future[StepOutcome] = asyncio.get_running_loop().create_future()
        self._asked_now.append((request, answer))
        return await answer

    def _send(self) -> None:
        asked, self._asked_now = self._asked_now, []
        call = asyncio.create_task(self._step_together(asked))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

        def cancel_if_nobody_waits(ended: "asyncio.Future[StepOutcome]") -> None:
            if ended.cancelled() and all(waiting.done() for _, waiting in asked):
                call.cancel()

        for _, waiting in asked:
            waiting.add_done_callback(cancel_if_nobody_waits)

    async def _step_together(self, asked: list[AskedStep]) -> None:
        """Hands each caller its answer as it comes; what breaks the call fails those that had none.

        The call ends when nobody waits for it any more; a single step of a shared call ends only by itself.
        """
        broken: Exception = EnvironmentLost(f"{self._who} ended the call without an answer.")
        try:
            call: Any = self._handle.options(stream=True).step.remote([request for request, _ in asked])
            while answers := await answer_of(anext(call, None), call, EnvironmentLost, self._who):
                for place, answer in answers:
                    settle(asked[place][1], answer)
        except RayServeException as error:
            broken = EnvironmentLost(f"{self._who} could not be reached: {error}")
        except Exception as error:  # noqa: BLE001 - it belongs to those who wait
            broken = error
        finally:
            for _, waiting in asked:
                settle(waiting, broken)

    async def describe(self) -> TaskDescription:
        description: TaskDescription = await self._answer(self._handle.describe.remote())
        return description

    async def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        samples: list[dict[str, Any]] = await self._answer(self._handle.example_samples.remote(count, seed))
        return samples

    async def _answer(self, response: Any) -> Any:
        return await answer_of(response, response, EnvironmentLost, self._who)
