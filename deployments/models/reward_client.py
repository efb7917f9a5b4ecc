"""A reward model of the service, as an environment asks it. Replica's half: `deployments/models/reward_replica.py`."""

from collections.abc import Sequence
from typing import Any

from deployments.failures import EnvironmentLost
from deployments.rpc.batching import CallBatcher, at_once, bytes_of_conversation
from deployments.rpc.handle_calls import StoreClient
from rollout_env import ChatMessage, ModelRefused, ModelUnavailable, RewardModel


class RemoteRewardModel(RewardModel):
    """Sends the conversations of one event-loop iteration in one call, or in several within the bounds of a message."""

    def __init__(self, name: str, handle: Any) -> None:
        """Takes the deployment's handle."""
        self._who = f"The reward model {name}"
        self._model = StoreClient(handle, EnvironmentLost, self._who)
        self._batcher: CallBatcher[Sequence[ChatMessage], float] = CallBatcher(
            at_once(self._scores), bytes_of_conversation
        )

    async def score(self, messages: Sequence[ChatMessage]) -> float:
        return await self._batcher.call(messages)

    async def _scores(self, conversations: list[Sequence[ChatMessage]]) -> list[float | Exception]:
        try:
            results = await self._model.score([list(messages) for messages in conversations])
        except Exception as error:  # noqa: BLE001 - whatever breaks the call, its conversations have no score
            message = f"{self._who} failed: {type(error).__name__}: {error}"
            return [ModelUnavailable(message) for _ in conversations]
        return [
            ModelRefused(f"{self._who} cannot score this: {result}.") if isinstance(result, Exception) else result
            for result in results
        ]
