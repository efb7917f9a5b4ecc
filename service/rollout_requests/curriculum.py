"""The curriculum: remembers pass rates of the samples of data sets, and selects by them. Store: `deployments/jobs`."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deployments.failures import StoreLost
from deployments.jobs.pass_rates import RewardNote, SampleKey
from deployments.storage.group_commit import GroupCommit
from rollout_client.contract.rollouts import SampleResult
from rollout_client.contract.sample_ranges import PlaceRange, SampleRange, SampleSelection
from service.rollouts.metrics import STATUSES_WITH_FINAL_REWARD

if TYPE_CHECKING:
    from deployments.jobs.store import JobStore

SCANNED_PER_SAMPLE = 4
"""Places of the data that are looked at for each sample that is selected."""
logger = logging.getLogger("rollout_service.requests")


class Curriculum:
    """Pass rates in the job store. What is noted while the store is lost is forgotten."""

    def __init__(self, store: "JobStore") -> None:
        self._store = store
        self._notes = GroupCommit[RewardNote, None](self._commit)

    def note(self, result: SampleResult, policy: str | None, version: int) -> None:
        """Notes the reward of a rollout, if that is final and its sample has an id."""
        if result.id is not None and result.status in STATUSES_WITH_FINAL_REWARD and result.total_reward is not None:
            key = SampleKey(policy, result.task_name, result.id)
            self._notes.put(RewardNote(key, version, result.total_reward))

    async def rates(self, keys: Sequence[SampleKey], since: int) -> list[float | None]:
        """Raises `JobStoreLost`."""
        return await self._store.pass_rates(keys, since)

    async def _commit(self, notes: list[RewardNote]) -> list[None]:
        try:
            await self._store.note_rewards(notes)
        except StoreLost as lost:
            logger.warning("The rewards of %s rollouts are not remembered: %s", len(notes), lost)
        return [None] * len(notes)


def selected(ids: Sequence[str], rates: Sequence[float | None], select: SampleSelection, count: int) -> list[int]:
    """The places, in ascending order, of the `count` samples that are drawn first: all, if there are fewer.

    Those without a rate come before those within the bounds, and these before the others, the nearest to them first; a
    sample that is there twice, in two epochs, counts once before all others have come.
    """
    low, high = select.pass_rate
    seen: set[str] = set()
    order: list[tuple[bool, float, int]] = []
    for place, (name, rate) in enumerate(zip(ids, rates, strict=True)):
        order.append((name in seen, -1.0 if rate is None else max(low - rate, rate - high, 0.0), place))
        seen.add(name)
    return sorted(place for _, _, place in sorted(order)[:count])


def selected_range(drawn: SampleRange, places: Sequence[int]) -> SampleRange:
    """The range of the samples at these places after its start, which leaves out those between them."""
    assert drawn.select is not None
    without = [
        PlaceRange(start=drawn.start + before + 1, count=place - before - 1)
        for before, place in zip((-1, *places), places, strict=False)
        if place > before + 1
    ]
    select = drawn.select.model_copy(update={"count": drawn.count})
    return drawn.model_copy(update={"count": places[-1] + 1, "without": without, "select": select})
