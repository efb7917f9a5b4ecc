"""Runs the steps of one environment replica: their queue, their time limit, their abortion, and how they fail."""

import asyncio
import logging
from functools import partial

from deployments.environments.step_slots import StepSlots
from deployments.failures import EnvironmentBroken, EnvironmentRejected, RolloutFailure, TurnTimedOut
from deployments.protocols import StepRequest
from rollout_env import OutcomeInvalid, SampleRejected, StepOutcome, TaskEnvironment
from rollout_env.validation import validated_step

CANCELLED = EnvironmentBroken("The environment cancelled its own step.")
StepResult = StepOutcome | RolloutFailure
logger = logging.getLogger("rollout_service.environments")


class StepRunner:
    """Runs steps concurrently, at most `max_concurrent_steps` of the environment at once.

    Guarantees: the time limit of a step begins when the environment is called; a step that reaches it has its failure
    at once, also if the environment ignores its cancellation; a step that is aborted is cancelled, or never begun.
    """

    def __init__(self, environment: TaskEnvironment, task_name: str, step_timeout_s: float | None) -> None:
        """Args: `step_timeout_s` is None for no limit."""
        self._environment = environment
        self._task_name = task_name
        self._step_timeout_s = step_timeout_s
        self._slots = StepSlots(environment.max_concurrent_steps)
        self._results: dict[str, asyncio.Future[StepResult]] = {}
        """Of the steps that run or wait, by `step_id`."""
        self.in_progress = 0
        """Steps that run or wait."""

    def start(self, request: StepRequest, shown: set[str]) -> "asyncio.Future[StepResult]":
        """Starts a step. Its failure is a result too. Cancelling the future aborts the step.

        Args:
            shown: the failures of the same call whose traceback is in the log already. The step adds its own.
        """
        result: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(request, result, shown))
        self._results[request.step_id] = result
        self.in_progress += 1
        result.add_done_callback(partial(self._end, request.step_id, task))
        task.add_done_callback(partial(copy_result, result))
        return result

    def abort(self, step_ids: list[str]) -> None:
        """Aborts steps that nobody waits for. Unknown ids are ignored."""
        for step_id in step_ids:
            if (result := self._results.get(step_id)) is not None:
                result.cancel()

    def _end(self, step_id: str, task: "asyncio.Task[StepResult]", result: "asyncio.Future[StepResult]") -> None:
        self.in_progress -= 1
        # A retry of the same step has the same id and may have replaced this one.
        if self._results.get(step_id) is result:
            del self._results[step_id]
        task.cancel()

    async def _run(self, request: StepRequest, result: "asyncio.Future[StepResult]", shown: set[str]) -> StepResult:
        await self._slots.acquire(request.request_id)
        # Not when this task ends: an environment that ignores its cancellation would keep the slot for ever.
        result.add_done_callback(lambda _: self._slots.release())
        if result.done():
            return CANCELLED
        if self._step_timeout_s is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._step_timeout_s, self._expire, request, result, shown)
            result.add_done_callback(lambda _: timer.cancel())
        try:
            return await validated_step(self._environment, request.message_log, request.extra_env_info)
        except asyncio.CancelledError as error:
            if result.done():
                raise
            return self._logged(CANCELLED, error, request, shown)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - all that an environment raises fails one sample, SystemExit too
            return CANCELLED if result.done() else self._logged(failure_of_step(error), error, request, shown)

    def _expire(self, request: StepRequest, result: "asyncio.Future[StepResult]", shown: set[str]) -> None:
        if not result.done():
            failure = TurnTimedOut(f"The environment's step took longer than {self._step_timeout_s:g} s.")
            result.set_result(self._logged(failure, None, request, shown))

    def _logged(
        self, failure: RolloutFailure, error: BaseException | None, request: StepRequest, shown: set[str]
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


def copy_result(result: "asyncio.Future[StepResult]", task: "asyncio.Task[StepResult]") -> None:
    """Gives the result of a task that has ended to whoever waits for it, unless it was aborted or timed out."""
    error = None if task.cancelled() else task.exception()
    if result.done():
        return
    if task.cancelled():
        result.cancel()
    elif error is not None:
        result.set_exception(error)
    else:
        result.set_result(task.result())


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
