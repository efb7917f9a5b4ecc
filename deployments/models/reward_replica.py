"""The deployment of a reward model: conversations that come while others are scored are scored together.

`RemoteRewardModel` (`deployments/models/reward_client.py`) is the caller.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Protocol

from deployments import logs
from deployments.failures import Overloaded
from deployments.models.reward_model import ClassificationModel
from deployments.models.settings import RewardModelSettings
from rollout_env import ChatMessage

logger = logging.getLogger("rollout_service.models")
MOST_AT_ONCE = 1024
"""Conversations of one call of the model, which divides them into forward passes: those that come later wait for it."""
Conversation = Sequence[ChatMessage]
Result = float | Exception


class Scorer(Protocol):
    """What a replica needs of a `ClassificationModel`."""

    def tokens(self, messages: Conversation) -> list[int]: ...
    def scores(self, conversations: Sequence[Sequence[int]]) -> list[float]: ...


class RewardModelReplica:
    """One replica of one reward model. Keeps nothing between calls."""

    def __init__(self, settings: RewardModelSettings, scorer: Scorer | None = None) -> None:
        """Args: `scorer` is in place of the model of the settings, for tests."""
        if scorer is None:
            logs.configure()
        self._max_waiting = settings.max_waiting
        self._scorer = ClassificationModel(settings) if scorer is None else scorer
        self._waiting: list[tuple[Conversation, asyncio.Future[Result]]] = []
        self._scoring: asyncio.Task[None] | None = None

    async def score(self, conversations: list[list[ChatMessage]]) -> list[Result]:
        """The score of each conversation; in its place the exception of one that the model cannot score.

        Raises:
            Overloaded: too many wait.
        """
        if len(self._waiting) + len(conversations) > self._max_waiting:
            raise Overloaded(f"{len(self._waiting)} conversations wait for the reward model.")
        loop = asyncio.get_running_loop()
        added = [(conversation, loop.create_future()) for conversation in conversations]
        self._waiting += added
        if self._scoring is None:
            self._scoring = loop.create_task(self._score_all())
        return list(await asyncio.gather(*(result for _, result in added)))

    async def _score_all(self) -> None:
        """Scores what waits, in a thread, until nothing does. One call of the model is under way at a time."""
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MOST_AT_ONCE], self._waiting[MOST_AT_ONCE:]
                wanted = [(conversation, result) for conversation, result in batch if not result.done()]
                results = await asyncio.to_thread(self._results, [conversation for conversation, _ in wanted])
                for (_, result), score in zip(wanted, results, strict=True):
                    if not result.done():
                        result.set_result(score)
        finally:
            self._scoring = None

    def _results(self, conversations: Sequence[Conversation]) -> list[Result]:
        """Together; if that fails, one by one, so that only those fail that the model cannot score."""
        try:
            return [
                finite(score) for score in self._scorer.scores([self._scorer.tokens(each) for each in conversations])
            ]
        except Exception as error:
            if len(conversations) == 1:
                logger.warning("A conversation could not be scored.", exc_info=error)
                return [ValueError(f"{type(error).__name__}: {error}")]
        return [result for conversation in conversations for result in self._results([conversation])]


def finite(score: float) -> Result:
    return score if math.isfinite(score) else ValueError(f"the score is {score}")
