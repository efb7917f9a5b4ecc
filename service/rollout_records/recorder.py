"""Writes a record of each rollout that has ended, and reads it. What is lost with the store is lost to the records
alone: no rollout waits for them, and those that wait for the store take bounded memory.
"""

import asyncio
import logging
import pickle
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel
from ray.serve import metrics

from deployments.failures import StoreLost
from deployments.rollout_records.book import KeptRecord, RolloutUnknown, rollout_unknown
from deployments.rpc.batching import CallBatcher, group_commit
from rollout_client.contract.base import set_fields
from rollout_client.contract.records import RecordedGeneration, RecordedState, RolloutRecord
from rollout_client.contract.rollouts import SampleResult
from service.access.keys import Caller
from service.rollouts.episode import Episode
from service.scheduling.fair_queue import priority_name

if TYPE_CHECKING:
    from deployments.rollout_records.store import RolloutRecordStore

KEPT_AFTER_S = (0.1, 0.3, 0.6)
"""Waits for a record: it is written beside the answer, which its caller may have sooner."""
MOST_HELD_BYTES = 64 * 2**20
"""Most bytes of records that wait for their store: the newest are dropped. One that is larger may wait alone."""
logger = logging.getLogger("rollout_service.records")


class RolloutRecorder:
    """The records of the rollouts that one ingress replica plays, and of all others to read.

    Args:
        time_s: seconds since 1970.
        most_held_bytes: bound of the records that wait for the store.
    """

    def __init__(
        self,
        store: "RolloutRecordStore",
        time_s: Callable[[], float] = time.time,
        most_held_bytes: int = MOST_HELD_BYTES,
    ) -> None:
        self.store = store
        self._time_s = time_s
        self._most_held_bytes = most_held_bytes
        self._held_bytes = 0
        self._dropped = metrics.Counter(
            "rollout_records_dropped",
            description="Records of rollouts that were dropped, because their store did not take them.",
        )
        self._records: CallBatcher[KeptRecord, None] = group_commit(self._commit, lambda record: record.size)

    def note(self, episode: Episode, result: SampleResult, ago_s: float = 0.0) -> None:
        """The rollout has ended with this result, so many seconds ago."""
        fields = {
            "rollout": _plain_fields(result),
            "request_id": episode.identity.request_id,
            "group_id": episode.identity.group_id,
            "policy": episode.start.bounds.policy,
            "priority": priority_name(episode.start.share.weight),
            "began_at": _began_at(episode),
            "ended_at": self._time_s() - ago_s,
            "generations": [
                _fields_for(RecordedGeneration, made)
                | {"message": episode.log.first_added + made.message, "began_at": made.began_at or None}
                for made in episode.generations
            ],
            "steps": [*map(asdict, episode.steps)],
            "retries": [*map(asdict, episode.retries.noted)],
            "states": [_fields_for(RecordedState, state) for state in episode.states],
            "restarts": episode.restarts,
            "retries_used": episode.retries_used,
        }
        owner = episode.start.share.key or ""
        record = KeptRecord(episode.identity.rollout_id, owner, pickle.dumps(fields, pickle.HIGHEST_PROTOCOL))
        if self._held_bytes and self._held_bytes + record.size > self._most_held_bytes:
            self._dropped.inc()
            return
        self._held_bytes += record.size
        self._records.add(record).add_done_callback(partial(self._let_go, record.size))

    def _let_go(self, size: int, kept: "asyncio.Future[None]") -> None:
        self._held_bytes -= size
        if (error := kept.exception()) is not None:
            logger.error("A record could not be kept.", exc_info=error)

    async def record(self, rollout_id: str, caller: Caller) -> RolloutRecord:
        """Raises `RolloutUnknown`, `StoreLost`."""
        kept = await self.kept(rollout_id, caller)
        if kept is None:
            raise rollout_unknown(rollout_id)
        return kept[0]

    async def kept(self, rollout_id: str, caller: Caller) -> tuple[RolloutRecord, int] | None:
        """The record and its size in bytes; `None` if the caller has no rollout of this name. Raises `StoreLost`.

        Records are written beside the answer: one that is asked for at once is waited for.
        """
        for wait_s in (*KEPT_AFTER_S, None):
            try:
                kept = await self.store.record(rollout_id, caller.namespace)
            except RolloutUnknown:
                if wait_s is not None:
                    await asyncio.sleep(wait_s)
            else:
                return await asyncio.to_thread(_record_of, kept), kept.size
        return None

    async def _commit(self, ended: list[KeptRecord]) -> list[None]:
        try:
            await self.store.keep(ended)
        except StoreLost as lost:
            logger.warning("The records of %s rollouts are lost: %s", len(ended), lost)
            self._dropped.inc(len(ended))
        return [None] * len(ended)


def _record_of(kept: KeptRecord) -> RolloutRecord:
    return RolloutRecord.model_validate(fields_of_record(kept))


def fields_of_record(kept: KeptRecord) -> dict[str, Any]:
    """The fields of a `RolloutRecord`, its numbers in arrays."""
    return cast(dict[str, Any], pickle.loads(kept.data))


def _fields_for(model: type[BaseModel], part: object) -> dict[str, Any]:
    return {name: getattr(part, name) for name in model.model_fields}


def _began_at(episode: Episode) -> float | None:
    """When it began, maybe in an earlier process."""
    known = [episode.began_at, *(made.began_at or None for made in episode.generations[:1])]
    return min((moment for moment in known if moment is not None), default=None)


def _plain_fields(value: Any) -> Any:
    """A result without models, which take ten times longer to pickle. Arrays of numbers stay as they are."""
    if type(value) in PLAIN or not value:
        return value
    if isinstance(value, BaseModel):
        return {name: _plain_fields(field) for name, field in set_fields(value).items()}
    # Lists are of one kind: of models, or of JSON that a caller or an environment has sent.
    if isinstance(value, list) and isinstance(value[0], BaseModel):
        return [*map(_plain_fields, value)]
    return value


PLAIN = frozenset({str, int, float, bool, type(None), array})
