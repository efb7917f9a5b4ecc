"""Writes a record of each rollout that has ended, and reads it. What is lost with the store is lost to the records
alone: no rollout waits for them.
"""

import asyncio
import logging
import pickle
import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from deployments.failures import StoreLost
from deployments.rollout_records.book import KeptRecord
from deployments.rollout_records.failures import RolloutUnknown
from deployments.storage.group_commit import GroupCommit
from rollout_client.contract.base import set_fields
from rollout_client.contract.rollout_records import RolloutRecord
from rollout_client.contract.rollouts import SampleResult
from service.access.keys import Caller
from service.rollouts.episode import Episode

if TYPE_CHECKING:
    from deployments.rollout_records.store import RolloutRecordStore

KEPT_AFTER_S = (0.1, 0.3, 0.6)
"""Waits for a record: it is written beside the answer, which its caller may have sooner."""
logger = logging.getLogger("rollout_service.records")


class RolloutRecorder:
    """The records of the rollouts that one ingress replica plays, and of all others to read.

    Args:
        node_of: the node of a generator replica; empty if it is not known.
        time_s: seconds since 1970.
    """

    def __init__(
        self,
        store: "RolloutRecordStore",
        node_of: Callable[[str], str] = lambda _: "",
        time_s: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self._node_of = node_of
        self._time_s = time_s
        self._records = GroupCommit[KeptRecord, None](self._commit, lambda record: record.size)

    def note(self, episode: Episode, result: SampleResult) -> None:
        """The rollout has ended with this result."""
        rollout_id, ended_at = episode.identity.rollout_id, self._time_s()
        fields = {
            "rollout": plain_fields(result),
            "request_id": episode.identity.request_id,
            "group_id": episode.identity.group_id,
            "policy": episode.start.bounds.policy,
            "ended_at": ended_at,
            "generations": [
                {
                    "message": episode.log.first_added + made.message,
                    "start": made.start,
                    "end": made.end,
                    "replica": made.replica,
                    "node": self._node_of(made.replica),
                    "cached_tokens": made.cached_tokens,
                    "batch_size": made.batch_size,
                    "waited_s": made.waited_s,
                    "took_s": made.took_s,
                }
                for made in episode.generations
            ],
            "steps_s": list(episode.steps_s),
            "states": [
                {
                    "turn": state.turn,
                    "extra_env_info": state.extra_env_info,
                    "stop_strings": list(state.stop_strings),
                }
                for state in episode.states
            ],
            "restarts": episode.restarts,
            "retries_used": episode.retries_used,
        }
        owner = episode.start.share.key or ""
        self._records.put(KeptRecord(rollout_id, owner, pickle.dumps(fields, pickle.HIGHEST_PROTOCOL), ended_at))

    async def record(self, rollout_id: str, caller: Caller) -> RolloutRecord:
        """Raises `RolloutUnknown`, `StoreLost`."""
        return record_of(await self.store.record(rollout_id, caller.namespace))

    async def kept(self, rollout_id: str, caller: Caller) -> tuple[RolloutRecord, int] | None:
        """The record and its size in bytes; `None` if the caller has no rollout of this name. Raises `StoreLost`."""
        for wait_s in (*KEPT_AFTER_S, None):
            try:
                kept = await self.store.record(rollout_id, caller.namespace)
            except RolloutUnknown:
                if wait_s is not None:
                    await asyncio.sleep(wait_s)
            else:
                return await asyncio.to_thread(record_of, kept), kept.size
        return None

    async def _commit(self, records: list[KeptRecord]) -> list[None]:
        try:
            await self.store.keep(records)
        except StoreLost as lost:
            logger.warning("The records of %s rollouts are lost: %s", len(records), lost)
        return [None] * len(records)


def record_of(kept: KeptRecord) -> RolloutRecord:
    return RolloutRecord.model_validate(fields_of_record(kept))


def fields_of_record(kept: KeptRecord) -> dict[str, Any]:
    """The fields of a `RolloutRecord`, its numbers in arrays."""
    fields: dict[str, Any] = pickle.loads(kept.data)
    return fields


def plain_fields(value: Any) -> Any:
    """A result without models, which take ten times longer to pickle. Arrays of numbers stay as they are."""
    if isinstance(value, BaseModel):
        return {name: plain_value(field) for name, field in set_fields(value).items()}
    return plain_value(value)


def plain_value(value: Any) -> Any:
    kind = type(value)
    if kind in PLAIN or not value:
        return value
    if kind is list:
        # Lists of one kind: of models, or of JSON that a caller or an environment has sent.
        return [*map(plain_fields, value)] if isinstance(value[0], BaseModel) else value
    if isinstance(value, BaseModel):
        return plain_fields(value)
    return value


PLAIN = frozenset({str, int, float, bool, type(None), array})
