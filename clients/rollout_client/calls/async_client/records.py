"""Methods of the client about rollouts that have ended, by their `rollout_id`."""

from typing import Unpack

from rollout_client.calls.async_client.connection import AsyncConnection
from rollout_client.calls.options import CallOptions
from rollout_client.calls.rollouts import rollout_record_call
from rollout_client.contract.rollout_records import RolloutRecord


class AsyncRecordMethods:
    _connection: AsyncConnection

    async def rollout_record(self, rollout_id: str, **options: Unpack[CallOptions]) -> RolloutRecord:
        """The result of a rollout that has ended, with where and how each of its generations was made.

        The service keeps it for `rollout_records.keep_s` of its config, for the key that has played it.
        """
        return await self._connection.short(rollout_record_call(rollout_id), options)
