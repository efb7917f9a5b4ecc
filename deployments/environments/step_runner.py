"""Runs the steps of one environment replica: queueing, time limits, cancellation and failures."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

from opentelemetry.context import attach
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from pydantic import BaseModel

from deployments.environments.sessions import FairSlots, Sessions
from deployments.failures import (
    EnvironmentBroken,
    EnvironmentLost,
    EnvironmentRejected,
    EnvironmentShuttingDown,
    RolloutFailure,
    TurnTimedOut,
)
from deployments.images.checks import NOT_TAKEN, ObservedImages, shows_images
from deployments.protocols.environments import StepRequest
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_env import ChatMessage, OutcomeInvalid, SampleRejected, StepOutcome, TaskEnvironment, TemporaryFailure
from rollout_env.environment import has_sessions, steps_in_batches
from rollout_env.steps import (
    batch_outcomes,
    is_plain,
    validated_extra_env_info,
    validated_outcome,
    validated_start,
    validated_step,
)

CANCELLED = EnvironmentBroken("The environment cancelled its own step.")
_MOST_THREADS = 64
"""Default limit of concurrent steps for a plain `step`, each of which takes a thread."""
_StepResult = StepOutcome | RolloutFailure
_StepFunction = Callable[[StepRequest], Awaitable[StepOutcome]]
logger = logging.getLogger("rollout_service.environments")


@dataclass(slots=True, eq=False)
class _BatchedStep:
    message_log: list[ChatMessage]
    state: BaseModel
    outcome: asyncio.Future[Any]
    """The environment's outcome, not yet validated."""


class _StepBatches:
    """Batches the steps of one environment; each caller awaits its own step.

    Guarantees: waits for no step that is not ready; a step that is invalid, or has an invalid outcome, fails alone; if
    the call for several raises, each is called alone; a call whose steps have all been abandoned is cancelled.
    """

    def __init__(self, environment: TaskEnvironment) -> None:
        self._environment = environment
        self._ready: list[_BatchedStep] = []
        self._calls = BackgroundTasks()

    async def step(self, message_log: list[ChatMessage], extra_env_info: dict[str, Any]) -> StepOutcome:
        """Raises what `rollout_env.steps.validated_step` raises."""
        state = validated_extra_env_info(self._environment, extra_env_info)
        step = _BatchedStep(message_log, state, asyncio.get_running_loop().create_future())
        if not self._ready:
            asyncio.get_running_loop().call_soon(self._start)
        self._ready.append(step)
        return validated_outcome(await step.outcome)

    def _start(self) -> None:
        steps = [step for step in self._ready if not step.outcome.done()]
        self._ready = []
        if not steps:
            return
        call = self._calls.start(self._call(steps))

        def cancel_if_all_done(_: "asyncio.Future[Any]") -> None:
            if all(step.outcome.done() for step in steps):
                call.cancel()

        for step in steps:
            step.outcome.add_done_callback(cancel_if_all_done)

    async def _call(self, steps: Sequence[_BatchedStep]) -> None:
        message_logs, states = [step.message_log for step in steps], [step.state for step in steps]
        try:
            outcomes = await batch_outcomes(self._environment, message_logs, states)
        except BaseException as error:  # noqa: BLE001 - all that an environment raises goes to its steps
            waiting = [step for step in steps if not step.outcome.done()]
            if len(steps) == 1 or isinstance(error, OutcomeInvalid):
                for step in waiting:
                    step.outcome.set_exception(error)
            else:
                await asyncio.gather(*(self._call([step]) for step in waiting))
            return
        for step, outcome in zip(steps, outcomes, strict=True):
            if not step.outcome.done():
                step.outcome.set_result(outcome)


@dataclass(slots=True, eq=False)
class _RunningStep:
    """A step that runs or waits."""

    request: StepRequest
    logged_failures: set[str]
    """Failures of the same call whose traceback is already in the log."""
    result: asyncio.Future[_StepResult]
    has_slot: bool = False
    deadline: asyncio.TimerHandle | None = None
    """Ends the step at its time limit, if there is one, from when it has its slot."""


class StepRunner:
    """Runs steps concurrently, at most `max_concurrent_steps` of the environment at once.

    Guarantees: the time limit of a step begins when the environment is called; a step that reaches it fails at once,
    even if the environment ignores its cancellation; a step that is aborted is cancelled, or never started;
    after `hand_off` no step runs.
    """

    def __init__(
        self,
        environment: TaskEnvironment,
        task_name: str,
        step_timeout_s: float | None,
        images: ObservedImages | None = None,
    ) -> None:
        """Runs no step yet; `step_timeout_s` is None for no limit.

        Args:
            images: keeps those that observations show; None where the service takes no images.
        """
        self._sessions = Sessions(environment, task_name) if has_sessions(type(environment)) else None
        batched = _StepBatches(environment).step if steps_in_batches(type(environment)) else None
        alone = _of_request(batched or partial(validated_step, environment))
        self._step = alone if self._sessions is None else self._sessions.step
        self._start_sample = _of_request(partial(validated_start, environment))
        self._images = images
        self._task_name = task_name
        self._step_timeout_s = step_timeout_s
        self._slots = FairSlots(environment.max_concurrent_steps or _default_concurrency(environment))
        self._steps: dict[str, _RunningStep] = {}
        """Steps that run or wait, by `step_id`."""
        self._hands_off = False
        self._shutting_down = EnvironmentShuttingDown(f"The replica of environment {task_name!r} is being shut down.")
        self.in_progress = 0
        """Number of steps that run or wait."""

    def start(self, request: StepRequest, logged_failures: set[str]) -> "asyncio.Future[_StepResult]":
        """Starts a step. Its failure is a result too. Cancelling the future aborts the step.

        Args:
            logged_failures: failures of the same call whose traceback is already in the log. The step adds its own.
        """
        loop = asyncio.get_running_loop()
        step = _RunningStep(request, logged_failures, loop.create_future())
        self._steps[request.step_id] = step
        self.in_progress += 1
        task = loop.create_task(self._run(step), context=_context_below(request.traceparent))
        step.result.add_done_callback(partial(self._end, step, task))
        if self._hands_off:
            self.fail([request.step_id], self._shutting_down)
        return step.result

    def abort(self, step_ids: list[str]) -> None:
        """Cancels steps whose callers have gone. Unknown ids are ignored."""
        for step_id in step_ids:
            if (step := self._steps.get(step_id)) is not None:
                step.result.cancel()

    def fail(self, step_ids: Sequence[str], failure: RolloutFailure) -> None:
        """Ends steps with this failure. Unknown ids are ignored."""
        for step_id in step_ids:
            step = self._steps.get(step_id)
            if step is not None and not step.result.done():
                step.result.set_result(failure)

    def hand_off(self) -> None:
        """Ends current and later steps with `EnvironmentShuttingDown`; their callers repeat them at other replicas."""
        self._hands_off = True
        if self._steps:
            logger.info("%d steps of task %s continue at other replicas.", len(self._steps), self._task_name)
        self.fail(list(self._steps), self._shutting_down)

    @property
    def load(self) -> int:
        """Steps that run or wait, or held sessions, whichever are more."""
        return self.in_progress if self._sessions is None else max(self.in_progress, self._sessions.count)

    def release(self, session_ids: list[str]) -> None:
        """Closes the sessions of rollouts that have ended. Unknown ids are ignored."""
        if self._sessions is not None:
            self._sessions.release(session_ids)

    async def close(self) -> None:
        """Closes all sessions."""
        if self._sessions is not None:
            await self._sessions.close()

    def _end(self, step: _RunningStep, task: "asyncio.Task[None]", _result: "asyncio.Future[_StepResult]") -> None:
        self.in_progress -= 1
        # A retry of the same step has the same id and may have replaced this one.
        if self._steps.get(step.request.step_id) is step:
            del self._steps[step.request.step_id]
        if step.deadline is not None:
            step.deadline.cancel()
        # Not when the task ends: an environment that ignores its cancellation would keep the slot for ever.
        if step.has_slot:
            self._slots.release()
        task.cancel()

    async def _run(self, step: _RunningStep) -> None:
        result: _StepResult
        try:
            # Not while it holds a slot: those that have a session need slots to come to its end.
            async with nullcontext() if self._sessions is None else self._sessions.reserve(step.request):
                result = await self._outcome(step)
        except asyncio.CancelledError as error:
            if step.result.done():
                raise
            result = self._logged(CANCELLED, error, step)
        except BaseException as error:  # noqa: BLE001 - all that an environment raises fails one sample, SystemExit too
            result = CANCELLED if step.result.done() else self._logged(_failure_of_step(error), error, step)
        if not step.result.done():
            step.result.set_result(result)

    async def _outcome(self, step: _RunningStep) -> _StepResult:
        await self._slots.acquire(step.request.request_id)
        step.has_slot = True
        if step.result.done():
            return CANCELLED
        if self._step_timeout_s is not None:
            step.deadline = asyncio.get_running_loop().call_later(self._step_timeout_s, self._expire, step)
        function = self._start_sample if step.request.is_start else self._step
        outcome = await function(step.request)
        if not shows_images(outcome):
            return outcome
        try:
            if self._images is None:
                raise EnvironmentBroken(NOT_TAKEN)
            return await self._images.kept(outcome, step.request.owner)
        except BaseException:
            # The session has made the step: made again there, it would be another one.
            self.release([step.request.session_id])
            raise

    def _expire(self, step: _RunningStep) -> None:
        """Ends a step that has reached its limit."""
        if not step.result.done():
            failure = TurnTimedOut(f"The environment's step took longer than {self._step_timeout_s:g} s.")
            step.result.set_result(self._logged(failure, None, step))

    def _logged(self, failure: RolloutFailure, error: BaseException | None, step: _RunningStep) -> RolloutFailure:
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


def _context_below(traceparent: str) -> Context:
    """A context for a task whose spans belong below the span of this header, if it is not empty."""
    context = copy_context()
    context.run(attach, TraceContextTextMapPropagator().extract({"traceparent": traceparent}))
    return context


def _of_request(step: Callable[[list[ChatMessage], dict[str, Any]], Awaitable[StepOutcome]]) -> _StepFunction:
    return lambda request: step(request.message_log, request.extra_env_info)


def _default_concurrency(environment: TaskEnvironment) -> int | None:
    if has_sessions(type(environment)):
        return _MOST_THREADS if is_plain(environment.open_session) else None
    in_threads = not steps_in_batches(type(environment)) and is_plain(environment.step)
    return _MOST_THREADS if in_threads else None


def _failure_of_step(error: BaseException) -> RolloutFailure:
    """The failure for an exception of an environment. Its message reaches the trainer; the traceback only the log."""
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
