"""A reward model of the service, as an environment asks it. Replica's half: `deployments/models/reward_replica.py`."""

from collections.abc import Sequence
from typing import Any

from deployments.failures import EnvironmentLost
from deployments.rpc.batching import CallBatcher, at_once, bytes_of_conversation
from deployments.rpc.store_client import StoreClient
from rollout_env import ChatMessage, ModelRefused, ModelUnavailable, RewardModel

MOST_PER_CALL = 256


class RemoteRewardModel(RewardModel):
    """Sends the conversations of one event-loop iteration in one call.

    More than `MOST_PER_CALL` of them, or than `MOST_BYTES_PER_MESSAGE`, are divided into several calls.
    """

    def __init__(self, name: str, handle: Any) -> None:
        """Takes the deployment's handle."""
        self._who = f"The reward model {name}"
        self._model = StoreClient(handle, EnvironmentLost, self._who)
        self._batcher: CallBatcher[Sequence[ChatMessage], float] = CallBatcher(
            at_once(self._scores), bytes_of_conversation, MOST_PER_CALL
        )

    async def score(self, messages: Sequence[ChatMessage]) -> float:
        return await self._batcher.call(messages)

    async def _scores(self, conversations: list[Sequence[ChatMessage]]) -> list[float | Exception]:
        try:
            results = await self._model.score([list(messages) for messages in conversations])
        except EnvironmentLost as error:
            return [ModelUnavailable(str(error)) for _ in conversations]
        except Exception as error:  # noqa: BLE001 - whatever breaks the call, its conversations have no score
            message = f"{self._who} failed: {type(error).__name__}: {error}"
            return [ModelUnavailable(message) for _ in conversations]
        return [self._refused(result) if isinstance(result, Exception) else result for result in results]

    def _refused(self, error: Exception) -> Exception:
        if isinstance(error, ModelUnavailable):
            return ModelUnavailable(str(error))
        return ModelRefused(f"{self._who} cannot score this: {error}.")
