"""Batched calls of a replica: streams of results, and control calls. Server half: `deployments/rpc/batching.py`."""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

from ray.serve.exceptions import RayServeException

from deployments.failures import RolloutFailure
from deployments.rpc.batching import BatchResults, CallBatcher
from deployments.rpc.handle_calls import call_result
from deployments.rpc.message_size import MOST_ITEMS_PER_MESSAGE
from deployments.upstream.ray_serve.serve_internals import cancel_call
from service.remote.replica_stream import ReplicaSilent, ReplicaWatch

logger = logging.getLogger("rollout_service.remote")

Request = TypeVar("Request")
Result = TypeVar("Result")
NO_FIELDS: Mapping[str, Any] = {}
MOST_ITERATIONS_PER_CALL = 4
"""An iteration of a busy event loop lets up to 64 rollouts go on (`service/rollouts/pacing.py`) and takes 6 ms."""


class ReplicaStream(Generic[Request, Result]):
    """Streaming calls of one deployment, or one replica of it, each with a batch of requests.

    A call costs the event loop about a millisecond: the busier it is, the more requests should go into one.
    """

    def __init__(
        self,
        start_call: Callable[[list[Request]], Any],
        lost: type[RolloutFailure],
        who: str,
        log_fields: Mapping[str, Any] = NO_FIELDS,
        results_of: Callable[[Any], BatchResults[Result]] = lambda item: item,
        silence: ReplicaWatch | None = None,
    ) -> None:
        """Makes no call yet.

        Args:
            start_call: starts a streaming call with these requests. `results_of` gives the results in an item of it.
            lost: raised when the replica, or the connection to it, breaks; `who` is the subject of its message.
            log_fields: the `extra` of log records.
            silence: the replica sends a heartbeat each second, and is `lost` when this misses too many. Streams of the
                same replica share it. `None` if the replica sends none.
        """
        self._start_call = start_call
        self._lost = lost
        self._who = who
        self._log_fields = log_fields
        self._results_of = results_of
        self._silence = silence

    def batched(
        self,
        bytes_of: Callable[[Request], int] = lambda _: 0,
        abort: CallBatcher[Request, None] | None = None,
        most_items: int | None = MOST_ITEMS_PER_MESSAGE,
        most_iterations: int | None = MOST_ITERATIONS_PER_CALL,
    ) -> CallBatcher[Request, Result]:
        """The batcher of these calls. `abort` aborts requests whose callers left while others of their call go on."""
        abandon = None if abort is None else abort.add
        return CallBatcher(
            self._results, bytes_of, most_items, most_iterations, abandon=abandon, on_broken=self._log_broken
        )

    async def _results(self, requests: list[Request]) -> AsyncIterator[tuple[int, Result | Exception]]:
        call, missing, silence = None, len(requests), self._silence
        try:
            call = self._start_call(requests)
            async with nullcontext() if silence is None else silence.watch():
                while (item := await call_result(anext(call, None), call, self._lost, self._who)) is not None:
                    if silence is not None:
                        silence.note_item()
                    for result in self._results_of(item):
                        missing -= 1
                        yield result
        except RayServeException as error:
            # Its message may hold addresses, and stays in the log.
            raise self._lost(f"{self._who} could not be reached.") from error
        except Exception as error:
            if silence is not None:
                silence.forget()
            if call is not None:
                cancel_call(call)
            if isinstance(error, ReplicaSilent):
                raise self._lost(f"{self._who} was silent for {error.heartbeats} heartbeats.") from error
            raise
        if missing:
            raise self._lost(f"{self._who} ended the call without an answer.")

    def _log_broken(self, missing: int, broken: Exception) -> None:
        # A lost replica is told by its sentence: the stack of the call that noticed it would add nothing.
        lost = isinstance(broken, self._lost)
        message = "A call broke before %d of its requests had a result: %s"
        extra = {**self._log_fields, "cause": repr(broken.__cause__)} if lost else self._log_fields
        logger.warning(message, missing, broken, exc_info=None if lost else broken, extra=extra)


def control_calls(
    start_call: Callable[[list[Request]], Any],
    done: str,
    lost: type[RolloutFailure],
    who: str,
    log_fields: Mapping[str, Any] = NO_FIELDS,
) -> CallBatcher[Request, None]:
    """Batches calls about running requests, such as their abortion, whose results nobody waits for.

    Args:
        start_call: starts a call about these requests. One that fails is logged.
        done: the participle of what the call does, for the log.
    """

    async def send(requests: list[Request]) -> AsyncIterator[tuple[int, None]]:
        not_done = f"{len(requests)} requests were not {done}"
        await call_unless_gone(partial(start_call, requests), lost, who, not_done, log_fields)
        for place in range(len(requests)):
            yield place, None

    return CallBatcher(send)


async def call_unless_gone(
    start_call: Callable[[], Any],
    lost: type[RolloutFailure],
    who: str,
    not_done: str,
    log_fields: Mapping[str, Any] = NO_FIELDS,
) -> None:
    """Makes a call that stops something at a replica. One that fails is logged as `not_done`: a lost replica does it no
    longer."""
    try:
        call = start_call()
        await call_result(call, call, lost, who)
    except (lost, RayServeException) as error:
        logger.info("%s: %s", not_done, error, extra=log_fields)
    except Exception:
        logger.exception("%s.", not_done, extra=log_fields)
