"""Methods of the client about rollouts that have ended: their records, and what they generate again."""

from collections.abc import Mapping
from typing import Any, Unpack

from rollout_client.calls.async_client.connection import AsyncConnection
from rollout_client.calls.options import CallOptions
from rollout_client.calls.rollouts import replay_call, rollout_record_call
from rollout_client.contract.replay import ReplayResponse
from rollout_client.contract.rollout_records import RolloutRecord
from rollout_client.contract.rollouts import SampleResult


class AsyncRecordMethods:
    _connection: AsyncConnection

    async def rollout_record(self, rollout_id: str, **options: Unpack[CallOptions]) -> RolloutRecord:
        """The result of a rollout that has ended, with where and how each of its generations was made.

        The service keeps it for `rollout_records.keep_s` of its config, for the key that has played it.
        """
        return await self._connection.short(rollout_record_call(rollout_id), options)

    async def replay(
        self,
        rollout: SampleResult | Mapping[str, Any] | None = None,
        *,
        rollout_id: str | None = None,
        **options: Unpack[CallOptions],
    ) -> ReplayResponse:
        """Generates the tokens of a rollout again, under the same weights, and compares them.

        Each generation is made again with the recorded tokens before it.

        Args:
            rollout: a result, as a request returned it or `read_rollouts` has read it.
            rollout_id: in its place, that of one whose record the service keeps.
        """
        limits = self._connection.defaults.limits(options)
        return await self._connection.result(replay_call(rollout, rollout_id), limits)
