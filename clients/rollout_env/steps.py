"""Steps of an environment with validated input and outcome, called without blocking the event loop.

The replicas of the service run them through the same functions as `play`, `check` and `serve`. A plain method runs in a
thread of its own: a pool would be exhausted by calls that hang, and the process would wait for them when it ends.
"""

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from rollout_env.environment import Session, TaskEnvironment, has_own_fork, has_sessions, steps_in_batches
from rollout_env.records import (
    ONE_MESSAGE,
    SEVERAL_MESSAGES,
    ChatMessage,
    OutcomeInvalid,
    SampleRejected,
    StartOutcome,
    StepOutcome,
)

Result = TypeVar("Result")
BEAT_S = 0.02
"""Seconds between two looks at whether a step blocks the event loop."""
_abandoned: set[threading.Thread] = set()
"""Threads whose callers have stopped waiting. Some have ended since."""


def abandoned_threads() -> int:
    """Number of threads that still run a call whose caller has stopped waiting, for example after a timeout."""
    _abandoned.difference_update([thread for thread in _abandoned if not thread.is_alive()])
    return len(_abandoned)


def is_plain(function: Callable[..., Any]) -> bool:
    return not inspect.iscoroutinefunction(function)


async def call(function: Callable[..., Result | Awaitable[Result]], *args: Any) -> Result:
    """Calls a plain or async function. If this is cancelled, a plain function runs on and its result is dropped."""
    result = await in_thread(function, *args) if is_plain(function) else function(*args)
    # A function that is async but does not look so, such as a decorated one, runs in the event loop like any other.
    return await result if inspect.isawaitable(result) else result


async def in_thread(function: Callable[..., Result], *args: Any) -> Result:
    """Calls the function in a new thread, in the context of the caller."""
    future = Future[Result]()
    # From here on, to cancel the wait does not cancel the future, which the thread still sets.
    future.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            future.set_result(context.run(function, *args))
        except StopIteration as stop:
            error = RuntimeError("The function raised StopIteration.")  # A future cannot hold that.
            error.__cause__ = stop
            future.set_exception(error)
        except BaseException as raised:  # noqa: BLE001 - whatever it is goes to the caller
            future.set_exception(raised)

    name = f"call of {getattr(function, '__qualname__', function)}"
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        _abandoned.add(thread)
        raise


class StepTooSlow(Exception):
    """The step took longer than its limit."""


async def longest_block(step: Awaitable[Result], timeout_s: float) -> tuple[Result, float]:
    """Awaits the step and measures the longest time in seconds for which it blocked the event loop.

    Blocks shorter than `BEAT_S` are missed; longer ones are measured up to `BEAT_S` too short.

    Raises:
        StepTooSlow: the step takes longer than `timeout_s`; it is cancelled.
        Exception: any that the step raises.
    """
    longest_s = 0.0
    task = asyncio.ensure_future(step)
    started = last = time.monotonic()
    try:
        while not task.done():
            if last - started > timeout_s:
                raise StepTooSlow(f"took longer than {timeout_s:g} s")
            await asyncio.wait([task], timeout=BEAT_S)
            now = time.monotonic()
            longest_s, last = max(longest_s, now - last - BEAT_S), now
        return task.result(), longest_s
    finally:
        task.cancel()


Record = TypeVar("Record", StartOutcome, StepOutcome)
TYPES: dict[type, TypeAdapter[Any]] = {record: TypeAdapter(record) for record in (StartOutcome, StepOutcome)}


async def validated_step(
    environment: TaskEnvironment, message_log: list[ChatMessage], extra_env_info: dict[str, Any]
) -> StepOutcome:
    """Runs one step, from `extra_env_info` as JSON to a valid outcome.

    Raises:
        SampleRejected: `extra_env_info` is not valid for `ExtraEnvInfo`, or the environment rejects it.
        OutcomeInvalid: the step did not return a valid outcome.
    """
    state = validated_extra_env_info(environment, extra_env_info)
    if steps_in_batches(type(environment)):
        [outcome] = await batch_outcomes(environment, [message_log], [state])
    else:
        outcome = await call(environment.step, message_log, state)
    return validated_outcome(outcome)


async def validated_start(
    environment: TaskEnvironment, message_log: list[ChatMessage], extra_env_info: dict[str, Any]
) -> StepOutcome:
    """Runs `start`, from `extra_env_info` as JSON to a valid outcome, which is that of a step without reward.

    Its `observation` is a list, empty if there is none.

    Raises:
        SampleRejected: `extra_env_info` is not valid for `ExtraEnvInfo`, or the environment rejects it.
        OutcomeInvalid: it did not return a valid outcome.
    """
    state = validated_extra_env_info(environment, extra_env_info)
    outcome: Any = await call(environment.start, message_log, state)
    checked = checked_record(outcome, StartOutcome, "start")
    begun = checked.observation
    messages = begun if isinstance(begun, list) else [] if begun is None else [begun]
    return StepOutcome(messages, 0.0, False, checked.metadata, checked.next_stop_strings)


async def opened_session(
    environment: TaskEnvironment, message_log: list[ChatMessage], extra_env_info: BaseModel, forks: bool = False
) -> Session:
    """Opens a session for the rollout whose next step judges the last of these messages.

    Args:
        forks: whether the earlier responses among them had their steps in another session, for `fork_session`.

    Raises:
        OutcomeInvalid: the environment did not return a session.
    """
    opening = opener(environment, forks)
    session: Any = await call(opening, message_log[:-1], extra_env_info)
    if not isinstance(session, Session):
        raise invalid(f"{opening.__name__} must return a Session, got {type(session).__name__}")
    return session


def opener(environment: TaskEnvironment, forks: bool) -> Callable[..., Any]:
    """The method that opens a session: `fork_session` for one that is forked, if the environment has it."""
    return environment.fork_session if forks and has_own_fork(environment) else environment.open_session


async def batch_outcomes(
    environment: TaskEnvironment, message_logs: list[list[ChatMessage]], states: list[Any]
) -> list[Any]:
    """Calls `step_batch`. The outcomes themselves are not validated.

    Raises:
        OutcomeInvalid: it did not return a list with one outcome for each response.
    """
    outcomes: Any = await call(environment.step_batch, message_logs, states)
    is_list = isinstance(outcomes, list | tuple)
    if is_list and len(outcomes) == len(message_logs):
        return list(outcomes)
    raise invalid(
        f"step_batch must return a list with one StepOutcome for each response, here {len(message_logs)}, got "
        f"{len(outcomes) if is_list else type(outcomes).__name__}"
    )


def validated_extra_env_info(environment: TaskEnvironment, extra_env_info: dict[str, Any]) -> BaseModel:
    """Makes the instance of `ExtraEnvInfo` that `step` is given.

    Raises:
        SampleRejected: `extra_env_info` is not valid for `ExtraEnvInfo`. The message names each wrong field.
    """
    try:
        return environment.ExtraEnvInfo.model_validate(extra_env_info)
    except ValidationError as error:
        problems = problems_of(error, "extra_env_info")
        raise SampleRejected(f"The environment cannot take this sample: {problems}.") from error


def validated_outcome(outcome: Any) -> StepOutcome:
    """Validates what `step` returned and copies it.

    Raises:
        OutcomeInvalid: it is not a `StepOutcome`, a field has a value that is not permitted, or it neither ends the
            rollout nor has an observation.
    """
    checked = checked_record(outcome, StepOutcome, "step")
    if checked.observation is None and not checked.terminated:
        raise invalid(
            "outcome.observation: None is for the step that ends the rollout; return a message, or terminated=True"
        )
    return checked


def checked_record(outcome: Any, record: type[Record], method: str) -> Record:
    """Validates what the method returned, which must be such a record, and copies it. Raises `OutcomeInvalid`."""
    if not isinstance(outcome, record):
        raise invalid(f"{method} must return a {record.__name__}, got {type(outcome).__name__}")
    try:
        given = {field.name: getattr(outcome, field.name) for field in fields(record)}
        checked: Record = TYPES[record].validate_python(given)
    except ValidationError as error:
        raise invalid(problems_of(error, "outcome")) from error
    return checked


def invalid(problem: str) -> OutcomeInvalid:
    return OutcomeInvalid(f"The environment's outcome is not valid: {problem}.")


def problems_of(error: ValidationError, whole: str) -> str:
    """Each problem with the path of its field, which begins with `whole`."""

    kinds = (ONE_MESSAGE, SEVERAL_MESSAGES)
    paths = [".".join([whole, *(str(part) for part in each["loc"] if part not in kinds)]) for each in error.errors()]
    return "; ".join(f"{path}: {problem['msg']}" for path, problem in zip(paths, error.errors(), strict=True))


class RolloutSteps:
    """Steps of one rollout, on several instances of its environment in turn, if it can move between them.

    A session stays with its instance, unless it can be opened again elsewhere: then each step has one of its own.

    Args:
        first: the index of the instance that makes the first step.
        forks: whether earlier turns of the rollout had their steps in another session.
    """

    def __init__(self, instances: Sequence[TaskEnvironment], first: int = 0, forks: bool = False) -> None:
        self._instances = instances
        self._next = first
        self._has_sessions = has_sessions(type(instances[0]))
        self._session: Session | None = None
        self._forks = forks

    async def step(self, message_log: list[ChatMessage], extra_env_info: dict[str, Any]) -> StepOutcome:
        """Runs one step, from `extra_env_info` as JSON to a valid outcome; raises as `validated_step`."""
        environment = self._instances[self._next % len(self._instances)]
        self._next += 1
        if not self._has_sessions:
            return await validated_step(environment, message_log, extra_env_info)
        state = validated_extra_env_info(environment, extra_env_info)
        if environment.lost_session == "reopen" and len(self._instances) > 1:
            await self.close()
        if self._session is None:
            self._session = await opened_session(environment, message_log, state, self._forks)
            self._forks = False
        return validated_outcome(await call(self._session.step, message_log, state))

    async def close(self) -> None:
        """Closes the session, if one is open."""
        session, self._session = self._session, None
        if session is not None:
            await call(session.close)
