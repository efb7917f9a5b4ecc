"""The method of the client that scores given tokens."""

from collections.abc import Iterable
from typing import Unpack

from rollout_client.calls.async_client.connection import AsyncConnection
from rollout_client.calls.options import call_options
from rollout_client.contract.scores import ScoreResponse
from rollout_client.score_calls import ScoreOptions, score_call


class AsyncScoreMethods:
    _connection: AsyncConnection

    async def score(self, sequences: Iterable[Iterable[int]], **options: Unpack[ScoreOptions]) -> ScoreResponse:
        """The log-probability of each token of `sequences` under the service's weights, in input order.

        Each sequence is a list of token ids, or a one-dimensional array or tensor of them. The log-probabilities are
        those of temperature 1, without top-p, top-k and min-p. A sequence that failed has an `error`.
        """
        limits = self._connection.defaults.limits(call_options(options))
        return await self._connection.result(score_call(sequences, options), limits)
