"""The store of the records of rollouts, one for the service: the Serve deployment that `rpc/store_client.py` calls.

Records are in memory alone: they are for looking back, and no rollout depends on them.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import islice

from deployments import logs
from deployments.rollout_records.book import KeptRecord, RecordBook
from deployments.rollout_records.settings import RolloutRecordsSettings
from deployments.upstream.ray_serve.install import install

EXPIRE_EVERY_S = 5.0


class RolloutRecordStore:
    """The store of the records.

    Args:
        time_s: seconds since 1970.
    """

    def __init__(self, settings: RolloutRecordsSettings, time_s: Callable[[], float] = time.time) -> None:
        logs.configure()
        install()
        self._book = RecordBook(settings)
        self._time_s = time_s
        self._expiring: asyncio.Task[None] | None = None

    async def keep(self, records: Sequence[KeptRecord]) -> None:
        """Keeps records of rollouts that have ended, `ended_at` in seconds since 1970."""
        for record in records:
            self._book.put(record)
        if self._expiring is None:
            self._expiring = asyncio.create_task(self._expire())

    async def record(self, rollout_id: str, owner: str) -> KeptRecord:
        """Raises `RolloutUnknown`."""
        return self._book.record(rollout_id, owner)

    async def newest(self, owner: str, most: int) -> list[KeptRecord]:
        """At most `most` records of the owner, the newest first."""
        return list(islice(self._book.newest(owner), most))

    async def answer(self) -> None:
        """Returns if the store answers."""

    async def _expire(self) -> None:
        while len(self._book):
            await asyncio.sleep(EXPIRE_EVERY_S)
            self._book.expire(self._time_s())
        self._expiring = None
