"""Admission and batching of the steps of one replica.

`FairSlots` decides which steps run and which wait: requests take turns. `StepBatches` calls an environment's
`step_batch` for all steps of one iteration of the event loop.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from deployments.rpc.background_tasks import BackgroundTasks
from rollout_env import ChatMessage, OutcomeInvalid, StepOutcome, TaskEnvironment
from rollout_env.steps import batch_outcomes, validated_extra_env_info, validated_outcome


class FairSlots:
    """At most `limit` steps hold a slot at once.

    Guarantees: while steps wait, every slot is held; requests take turns, so a request of one step does not wait for
    all steps of a large one; the steps of one request get their slots in the order in which they came; a step that is
    cancelled while it waits takes no slot.
    """

    def __init__(self, limit: int | None) -> None:
        """Frees all slots; `limit` is None for no limit."""
        self._free = limit
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Futures of waiting steps by request, in the order of their turns."""

    @property
    def is_full(self) -> bool:
        """Whether a step would have to wait for its slot."""
        return self._free == 0

    async def acquire(self, request_id: str) -> None:
        """Returns when a step of the request has a slot, which the caller must release."""
        if self._free is None:
            return
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request_id, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # The slot was given in the same iteration of the event loop.
                self.release()
            raise

    def release(self) -> None:
        """Gives the slot of a step to the step whose turn it is."""
        if self._free is None:
            return
        while self._waiting:
            request_id, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[request_id] = turns
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1


@dataclass(slots=True, eq=False)
class _BatchedStep:
    message_log: list[ChatMessage]
    state: BaseModel
    outcome: asyncio.Future[Any]
    """The environment's outcome, not yet validated."""


class StepBatches:
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
