"""The ledger of what a job over a data set has delivered, and the cursor of the samples that are left. No I/O.

A group has failed when none of its rollouts was played to its end: nothing of it can be trained on, so its sample is
left. An entry of the ledger is the place of a delivered group among the samples of the request; in a job that selects
groups, which come in the order of their samples, it is how many samples were drawn, and how many groups kept.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count

from pydantic import TypeAdapter

from deployments.storage.storage import EntryName
from rollout_client.contract.jobs import JobCursor
from rollout_client.contract.rollouts import SampleStatus
from rollout_client.contract.sample_ranges import PlaceRange, SampleRange, moved_past

RANGES = EntryName("ledger", 0)
"""The entry of the job's ranges, in JSON."""
PLAYED: frozenset[SampleStatus | None] = frozenset(("completed", "truncated", "max_turns"))
"""The statuses of rollouts that were played to their ends."""
_ranges_adapter = TypeAdapter(list[SampleRange])


def ranges_entry(ranges: Sequence[SampleRange]) -> bytes:
    return _ranges_adapter.dump_json(list(ranges), exclude_unset=True)


def ranges_in(entry: bytes) -> list[SampleRange]:
    return _ranges_adapter.validate_json(entry)


def selection_entry(drawn: int, kept: int) -> bytes:
    return b"%d %d" % (drawn, kept)


def cursor_of(job_id: str, event: int, ledger: Mapping[EntryName, bytes]) -> JobCursor:
    """The cursor after `event`. `ledger` has the entries of the events up to it, and that of the ranges."""
    ranges = ranges_in(ledger[RANGES])
    # Earlier versions of the service have stored `7 failed` of a group that is left, and `9 kept 3`.
    stored = [entry for name, entry in ledger.items() if name != RANGES and not entry.endswith(b"failed")]
    entries = [tuple(map(int, entry.replace(b"kept", b"").split())) for entry in stored]
    if entries and len(entries[0]) > 1:
        drawn, kept = max(entries)
        return JobCursor(job_id=job_id, event=event, samples_from=moved_past(ranges, drawn), kept=kept)
    left = list(ranges_without(ranges, {group for (group,) in entries}))
    return JobCursor(job_id=job_id, event=event, samples_from=left)


def ranges_without(ranges: Iterable[SampleRange], groups: Collection[int]) -> Iterator[SampleRange]:
    """The ranges, which leave these groups out as well.

    Args:
        groups: places among the samples of all ranges.
    """
    numbers = count()
    for drawn in ranges:
        places = (place for piece in drawn.pieces() for place in range(piece.start, piece.end))
        left = {place for place in places if next(numbers) not in groups}
        without = [place for place in range(drawn.start, drawn.end) if place not in left]
        yield drawn.model_copy(update={"without": _runs(without)})


def _runs(places: Sequence[int]) -> list[PlaceRange]:
    """The places, which ascend, as ranges of those that follow one another."""
    known = set(places)
    starts = [place for place in places if place - 1 not in known]
    ends = [place + 1 for place in places if place + 1 not in known]
    return [PlaceRange(start=start, count=end - start) for start, end in zip(starts, ends, strict=True)]
