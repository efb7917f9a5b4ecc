"""A reward model of the service, as an environment asks it. Replica's half: `deployments/models/reward_replica.py`."""

import asyncio
from collections.abc import Sequence
from typing import Any

from deployments.failures import EnvironmentLost, Overloaded
from deployments.rpc.handle_calls import call_result
from rollout_env import ChatMessage, ModelRefused, ModelUnavailable, RewardModel

MOST_PER_CALL = 256


class RemoteRewardModel(RewardModel):
    """Sends the conversations of one event-loop iteration in one call, or in calls of `MOST_PER_CALL`."""

    def __init__(self, name: str, handle: Any) -> None:
        """Args: `handle` is that of the deployment."""
        self._name = name
        self._handle = handle
        self._waiting: list[tuple[Sequence[ChatMessage], asyncio.Future[float]]] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def score(self, messages: Sequence[ChatMessage]) -> float:
        loop = asyncio.get_running_loop()
        score: asyncio.Future[float] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting.append((messages, score))
        return await score

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for begin in range(0, len(waiting), MOST_PER_CALL):
            call = asyncio.create_task(self._score(waiting[begin : begin + MOST_PER_CALL]))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _score(self, batch: Sequence[tuple[Sequence[ChatMessage], "asyncio.Future[float]"]]) -> None:
        conversations = [list(messages) for messages, score in batch if not score.done()]
        scores = [score for _, score in batch if not score.done()]
        if not scores:
            return
        results: Sequence[Any]
        try:
            call = self._handle.score.remote(conversations)
            results = await call_result(call, call, EnvironmentLost, f"The reward model {self._name}")
        except (EnvironmentLost, Overloaded) as error:
            results = [ModelUnavailable(str(error))] * len(scores)
        except Exception as error:  # noqa: BLE001 - whatever breaks the call, its conversations have no score
            results = [
                ModelUnavailable(f"The reward model {self._name} failed: {type(error).__name__}: {error}")
            ] * len(scores)
        for score, result in zip(scores, results, strict=True):
            if score.done():
                continue
            if isinstance(result, ModelUnavailable):
                score.set_exception(ModelUnavailable(str(result)))
            elif isinstance(result, Exception):
                score.set_exception(ModelRefused(f"The reward model {self._name} cannot score this: {result}."))
            else:
                score.set_result(result)
