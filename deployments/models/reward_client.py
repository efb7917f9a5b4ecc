"""A reward model of the service, as an environment asks it. Replica's half: `deployments/models/reward_replica.py`."""

import asyncio
from collections.abc import Sequence
from typing import Any

from deployments.failures import EnvironmentLost, Overloaded
from deployments.rpc.batching import IterationBatcher
from deployments.rpc.handle_calls import call_result
from deployments.rpc.message_size import bytes_of_conversation, divided
from rollout_env import ChatMessage, ModelRefused, ModelUnavailable, RewardModel

MOST_PER_CALL = 256
Waiting = tuple[Sequence[ChatMessage], "asyncio.Future[float]"]


class RemoteRewardModel(RewardModel):
    """Sends the conversations of one event-loop iteration in one call.

    More than `MOST_PER_CALL` of them, or than `MOST_BYTES_PER_MESSAGE`, are divided into several calls.
    """

    def __init__(self, name: str, handle: Any) -> None:
        """Args: `handle` is that of the deployment."""
        self._name = name
        self._handle = handle
        self._batcher = IterationBatcher(self._send)
        self._calls: set[asyncio.Task[None]] = set()

    async def score(self, messages: Sequence[ChatMessage]) -> float:
        score: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._batcher.add((messages, score))
        return await score

    def _send(self, waiting: list[Waiting]) -> None:
        for batch in divided(waiting, lambda each: bytes_of_conversation(each[0]), MOST_PER_CALL):
            call = asyncio.create_task(self._score(batch))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _score(self, batch: Sequence[Waiting]) -> None:
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
