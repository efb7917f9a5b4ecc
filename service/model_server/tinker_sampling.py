"""Carries out Tinker's `asample`: a text completion samples, `/score` says the log-probabilities of the prompt.

A client asks for the answer later, by the name of its call: a future of one ingress replica.

Guarantees: the work of a name is started once, however often it is asked to; a caller sees only futures of its own key;
work that nobody asks for is cancelled, and its answer dropped, after `_FORGET_AFTER_S`; the answers that are kept are
together at most `most_bytes`, of which those that ended first are dropped first.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import Context
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson

from deployments.failures import GenerationLost, GenerationRejected, RolloutFailure
from deployments.protocols.generation import ScoredPrompt
from deployments.rpc.background_tasks import BackgroundTasks
from deployments.upstream.ray_serve.own_replica import has_died, is_name_of_replica, own_name
from rollout_client.contract.base import FieldProblem
from rollout_client.contract.rollouts import SampleError
from service.access.keys import Caller
from service.http.request_body import JSON
from service.model_server.call_bodies import MOST_BYTES_INLINE
from service.model_server.calls import ModelCalls, refusal_in
from service.model_server.tinker_dialect import SampleCall, sample_result
from service.problems import FUTURE_LOST, RequestProblem, problem_of
from service.scheduling.fair_queue import share_of
from service.scoring.scoring import Score, Scoring

_PROTOBUF = "application/x-protobuf"
_FORGET_AFTER_S = 300.0
"""A client that polls asks again at once; its process may be stopped for a while."""
_MOST_BYTES = 2**28
_BYTES_OF_A_FUTURE = 2**11
"""Memory of a future beside its answer, about."""
_ELSEWHERE_S = 0.1
"""Until the client asks again, and maybe reaches the ingress replica that has its answer."""
_OWNER = "@"
"""Stands between the name of a future and the ingress replica that has it."""
_Name = tuple[str, str]
"""The namespace of a key, and an id within it."""
logger = logging.getLogger("rollout_service.tinker")


@dataclass(frozen=True, slots=True)
class _FutureAnswer:
    """The body of an answer, as its client reads it."""

    body: bytes
    media_type: str


_Answering = Coroutine[Any, Any, _FutureAnswer]


@dataclass(slots=True)
class _Future:
    """Work whose answer is asked for later."""

    task: "asyncio.Task[_FutureAnswer]"
    timer: asyncio.TimerHandle | None = None
    """Forgets it."""
    size_bytes: int = 0
    """Size of its answer, once it has ended."""


def _replica_is_gone(name: str) -> bool:
    return not is_name_of_replica(name) or has_died(name)


class _Futures:
    """The futures of one ingress replica.

    Args:
        most_bytes: bound of the answers that are kept.
        is_gone: whether the ingress replica of this name has died; may block.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES, is_gone: Callable[[str], bool] = _replica_is_gone) -> None:
        self._owner = own_name()
        self._most_bytes = most_bytes
        self._is_gone = is_gone
        self._futures: dict[_Name, _Future] = {}
        """Those that have ended are in the order in which they did."""
        self._bytes = 0
        self._tasks = BackgroundTasks()

    def start(self, namespace: str, name: str, work: Callable[[], _Answering], on_end: Callable[[], None]) -> str:
        """Starts the work, unless it was before, and returns the id by which its answer is asked for.

        Args:
            namespace: of the caller's key.
            on_end: is called exactly once, when the work has ended; at once if it is not started.
        """
        future_id = f"{name}{_OWNER}{self._owner}"
        key = namespace, future_id
        if key in self._futures:
            on_end()
            return future_id
        task = self._tasks.start(work(), Context())
        self._futures[key] = _Future(task)
        task.add_done_callback(lambda _: on_end())
        task.add_done_callback(lambda done: self._note_end(key, done))
        self._forget_after(_FORGET_AFTER_S, key)
        return future_id

    async def answer(self, namespace: str, future_id: str, wait_s: float) -> _FutureAnswer | None:
        """The answer; `None` if there is none within `wait_s` seconds, or another replica has it, which lives.

        Raises:
            RequestProblem: 410, it is not kept any longer, or its work cannot succeed here now.
        """
        key = namespace, future_id
        if (future := self._futures.get(key)) is None:
            _, _, owner = future_id.rpartition(_OWNER)
            if owner != self._owner and not await asyncio.to_thread(self._is_gone, owner):
                await asyncio.sleep(_ELSEWHERE_S)
                return None
            raise _future_lost("no replica keeps it any longer; send the call again", future_id)
        self._forget_after(wait_s + _FORGET_AFTER_S, key)
        await asyncio.wait({future.task}, timeout=wait_s)
        if not future.task.done():
            return None
        if future.task.cancelled():
            raise _future_lost("it was cancelled; send the call again", future_id)
        return future.task.result()

    def cancel(self, namespace: str, future_id: str) -> None:
        """Ends the work and forgets it. Unknown ids are ignored."""
        if (future := self._futures.pop((namespace, future_id), None)) is None:
            return
        if future.timer is not None:
            future.timer.cancel()
        future.task.cancel()
        self._bytes -= future.size_bytes

    def _forget_after(self, seconds: float, key: _Name) -> None:
        future = self._futures[key]
        if future.timer is not None:
            future.timer.cancel()
        future.timer = asyncio.get_running_loop().call_later(seconds, self.cancel, *key)

    def _note_end(self, key: _Name, done: "asyncio.Task[_FutureAnswer]") -> None:
        failed = done.cancelled() or done.exception() is not None
        if (future := self._futures.pop(key, None)) is None:
            return
        self._futures[key] = future
        future.size_bytes = _BYTES_OF_A_FUTURE + (0 if failed else len(done.result().body))
        self._bytes += future.size_bytes
        while self._bytes > self._most_bytes:
            self.cancel(*next(name for name, one in self._futures.items() if one.size_bytes))


class TinkerSampling:
    """Samples for Tinker's clients in one ingress replica."""

    def __init__(self, calls: ModelCalls, scoring: Scoring) -> None:
        self.futures = _Futures()
        self._calls = calls
        self._scoring = scoring

    async def answer(self, call: SampleCall, request_id: str, caller: Caller) -> _FutureAnswer:
        """The samples, or why there are none and will be none.

        Raises:
            RequestProblem: 410, the same call can succeed: its client sends it again.
        """
        try:
            return _FutureAnswer(await self._sampled(call, request_id, caller), _PROTOBUF)
        except Exception as error:
            log_fields = {"request_id": request_id}
            if isinstance(error, RolloutFailure) and error.retryable:
                logger.warning("A call of Tinker's API is to be sent again: %s", error, extra=log_fields)
                raise _future_lost(f"{error} Send the call again", call.name) from error
            is_users = isinstance(error, RolloutFailure)
            problem = problem_of(error).problem
            if not is_users and problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                logger.error("A call of Tinker's API failed unexpectedly.", exc_info=error, extra=log_fields)
                return _failed(problem.detail or problem.title, "server")
            return _failed(str(error), "user")

    async def _sampled(self, call: SampleCall, request_id: str, caller: Caller) -> bytes:
        # Scored first: that leaves the prompt in the prefix cache.
        score = await self._scored(call, request_id, caller)
        sampler, body = call.sampler, call.completion()
        share = share_of(f"tinker-{sampler.session}", sampler.priority, caller)
        answer = await self._calls.answer(
            "completions", body, request_id, caller, choices=call.choices, demand=sampler.demand, share=share
        )
        completion = await answer.whole()
        if answer.status != HTTPStatus.OK:
            raise GenerationRejected(refusal_in(completion)[1])
        if len(completion) <= MOST_BYTES_INLINE:
            return sample_result(call, completion, score)
        return await asyncio.to_thread(sample_result, call, completion, score)

    async def _scored(self, call: SampleCall, request_id: str, caller: Caller) -> ScoredPrompt | None:
        if call.score is None:
            return None
        scores = list[Score]()

        async def keep(_: int, score: Score) -> None:
            scores.append(score)

        await self._scoring.score(call.score, request_id, keep, caller)
        [score] = scores
        if isinstance(score, SampleError):
            raise GenerationLost(score.message) if score.retryable else GenerationRejected(score.message)
        return score


def _failed(message: str, category: str) -> _FutureAnswer:
    return _FutureAnswer(orjson.dumps({"error": message, "category": category}), JSON)


def _future_lost(message: str, future_id: str) -> RequestProblem:
    return RequestProblem(FUTURE_LOST, [FieldProblem(field="request_id", message=message, value=future_id)])
