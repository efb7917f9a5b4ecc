"""Runs the steps of one environment replica: their queue, their time limit, their abortion, and how they fail."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from deployments.environments.sessions import Sessions
from deployments.environments.step_queue import StepBatches, StepSlots
from deployments.failures import (
    EnvironmentBroken,
    EnvironmentLost,
    EnvironmentRejected,
    EnvironmentShuttingDown,
    RolloutFailure,
    TurnTimedOut,
)
from deployments.protocols.environments import StepRequest
from deployments.traces import context_below
from rollout_env import ChatMessage, OutcomeInvalid, SampleRejected, StepOutcome, TaskEnvironment, TemporaryFailure
from rollout_env.calls import is_plain
from rollout_env.environment import has_sessions, steps_in_batches
from rollout_env.steps import validated_start, validated_step

CANCELLED = EnvironmentBroken("The environment cancelled its own step.")
MOST_THREADS = 64
"""Steps of a plain `step` that run at once, each in a thread, unless the environment says how many."""
StepResult = StepOutcome | RolloutFailure
StepFunction = Callable[[StepRequest], Awaitable[StepOutcome]]
logger = logging.getLogger("rollout_service.environments")


@dataclass(slots=True, eq=False)
class Step:
    """A step that runs or waits."""

    request: StepRequest
    logged_failures: set[str]
    """The failures of the same call whose traceback is in the log already."""
    result: asyncio.Future[StepResult]
    has_slot: bool = False


class StepRunner:
    """Runs steps concurrently, at most `max_concurrent_steps` of the environment at once.

    Guarantees: the time limit of a step begins when the environment is called; a step that reaches it has its failure
    at once, also if the environment ignores its cancellation; a step that is aborted is cancelled, or never begun;
    after `hand_over` no step runs.
    """

    def __init__(self, environment: TaskEnvironment, task_name: str, step_timeout_s: float | None) -> None:
        """Args: `step_timeout_s` is None for no limit."""
        self._sessions = Sessions(environment, task_name) if has_sessions(type(environment)) else None
        self._step = step_function(environment) if self._sessions is None else self._sessions.step
        self._start_sample = of_request(partial(validated_start, environment))
        self._task_name = task_name
        self._step_timeout_s = step_timeout_s
        self._slots = StepSlots(environment.max_concurrent_steps or default_concurrency(environment))
        self._steps: dict[str, Step] = {}
        """Those that run or wait, by `step_id`."""
        self._expires_at: dict[Step, float] = {}
        """Of the steps that run, the first to expire first: all have the same limit, so one timer serves them."""
        self._timer: asyncio.TimerHandle | None = None
        self._hands_over = False
        self.in_progress = 0
        """Steps that run or wait."""

    def start(self, request: StepRequest, logged_failures: set[str]) -> "asyncio.Future[StepResult]":
        """Starts a step. Its failure is a result too. Cancelling the future aborts the step.

        Args:
            logged_failures: the failures of the same call whose traceback is in the log already. The step adds its own.
        """
        loop = asyncio.get_running_loop()
        step = Step(request, logged_failures, loop.create_future())
        self._steps[request.step_id] = step
        self.in_progress += 1
        task = loop.create_task(self._run(step), context=context_below(request.traceparent))
        step.result.add_done_callback(partial(self._end, step, task))
        if self._hands_over:
            self._hand_over(step)
        return step.result

    def abort(self, step_ids: list[str]) -> None:
        """Aborts steps that nobody waits for. Unknown ids are ignored."""
        for step_id in step_ids:
            if (step := self._steps.get(step_id)) is not None:
                step.result.cancel()

    def give_up(self, step_ids: Sequence[str], failure: RolloutFailure) -> None:
        """Ends steps with this failure. Unknown ids are ignored."""
        for step_id in step_ids:
            step = self._steps.get(step_id)
            if step is not None and not step.result.done():
                step.result.set_result(failure)

    def hand_over(self) -> None:
        """Gives up the steps that run or wait, and those that still come: `EnvironmentShuttingDown` is their result,
        with which their callers have them made at other replicas."""
        self._hands_over = True
        if self._steps:
            logger.info("%d steps of task %s go on at other replicas.", len(self._steps), self._task_name)
        for step in list(self._steps.values()):
            self._hand_over(step)

    def _hand_over(self, step: Step) -> None:
        if not step.result.done():
            step.result.set_result(
                EnvironmentShuttingDown(f"The replica of environment {self._task_name!r} is being shut down.")
            )

    @property
    def load(self) -> int:
        """Steps that run or wait; or the sessions that are held, if there are more of them."""
        return self.in_progress if self._sessions is None else max(self.in_progress, self._sessions.count)

    def release(self, session_ids: list[str]) -> None:
        """Closes the sessions of rollouts that have ended. Unknown ids are ignored."""
        if self._sessions is not None:
            self._sessions.release(session_ids)

    async def close(self) -> None:
        """Closes all sessions."""
        if self._sessions is not None:
            await self._sessions.close()

    def _end(self, step: Step, task: "asyncio.Task[None]", _result: "asyncio.Future[StepResult]") -> None:
        self.in_progress -= 1
        # A retry of the same step has the same id and may have replaced this one.
        if self._steps.get(step.request.step_id) is step:
            del self._steps[step.request.step_id]
        self._expires_at.pop(step, None)
        # Not when the task ends: an environment that ignores its cancellation would keep the slot for ever.
        if step.has_slot:
            self._slots.release()
        task.cancel()

    async def _run(self, step: Step) -> None:
        result: StepResult
        try:
            # Not while it holds a slot: those that have a session need slots to come to its end.
            async with nullcontext() if self._sessions is None else self._sessions.room(step.request):
                result = await self._outcome(step)
        except asyncio.CancelledError as error:
            if step.result.done():
                raise
            result = self._logged(CANCELLED, error, step)
        except (KeyboardInterrupt, GeneratorExit) as error:
            if not step.result.done():
                step.result.set_exception(error)
            raise
        except BaseException as error:  # noqa: BLE001 - all that an environment raises fails one sample, SystemExit too
            result = CANCELLED if step.result.done() else self._logged(failure_of_step(error), error, step)
        if not step.result.done():
            step.result.set_result(result)

    async def _outcome(self, step: Step) -> StepResult:
        await self._slots.acquire(step.request.request_id)
        step.has_slot = True
        if step.result.done():
            return CANCELLED
        if self._step_timeout_s is not None:
            self._start_clock(step, self._step_timeout_s)
        function = self._start_sample if step.request.is_start else self._step
        return await function(step.request)

    def _start_clock(self, step: Step, limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        expires_at = self._expires_at[step] = loop.time() + limit_s
        if self._timer is None:
            self._timer = loop.call_at(expires_at, self._expire)

    def _expire(self) -> None:
        """Ends the steps that have reached their limit, and sets the timer to the next one."""
        loop = asyncio.get_running_loop()
        self._timer = None
        for step, expires_at in list(self._expires_at.items()):
            if expires_at > loop.time():
                self._timer = loop.call_at(expires_at, self._expire)
                return
            del self._expires_at[step]
            if not step.result.done():
                failure = TurnTimedOut(f"The environment's step took longer than {self._step_timeout_s:g} s.")
                step.result.set_result(self._logged(failure, None, step))

    def _logged(self, failure: RolloutFailure, error: BaseException | None, step: Step) -> RolloutFailure:
        # An environment that rejects a sample answers: its code has no fault that a traceback would show.
        is_answer = isinstance(failure, EnvironmentRejected)
        traceback_of = None if is_answer or str(failure) in step.logged_failures else error
        step.logged_failures.add(str(failure))
        context = {
            "request_id": step.request.request_id,
            "rollout_id": step.request.rollout_id,
            "task_name": self._task_name,
            "sample": step.request.sample,
        }
        logger.warning("A step of task %s failed: %s", self._task_name, failure, exc_info=traceback_of, extra=context)
        return failure


def step_function(environment: TaskEnvironment) -> StepFunction:
    """Runs one step, validated on both sides: alone, or together with those that are ready at the same moment."""
    if steps_in_batches(type(environment)):
        return of_request(StepBatches(environment).step)
    return of_request(partial(validated_step, environment))


def of_request(step: Callable[[list[ChatMessage], dict[str, Any]], Awaitable[StepOutcome]]) -> StepFunction:
    return lambda request: step(request.message_log, request.extra_env_info)


def default_concurrency(environment: TaskEnvironment) -> int | None:
    if has_sessions(type(environment)):
        return MOST_THREADS if is_plain(environment.open_session) else None
    in_threads = not steps_in_batches(type(environment)) and is_plain(environment.step)
    return MOST_THREADS if in_threads else None


def failure_of_step(error: BaseException) -> RolloutFailure:
    """Names what an environment raised. Its message goes to the trainer; the traceback goes to the log only."""
    match error:
        case SampleRejected():
            return EnvironmentRejected(str(error))
        case OutcomeInvalid():
            return EnvironmentBroken(str(error))
        case TemporaryFailure():
            return EnvironmentLost(str(error))
        # A class of the environment's own may not be importable where the failure is unpickled.
        case RolloutFailure() if type(error).__module__ == RolloutFailure.__module__:
            return error
        case _:
            return EnvironmentBroken(f"The environment raised {type(error).__name__}: {error}")
