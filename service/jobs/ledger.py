"""Which samples of a job's data set were delivered, and what is left of them. No I/O."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from pydantic import TypeAdapter

from deployments.jobs.records import EntryName
from rollout_client.jobs_contract import JobCursor
from rollout_client.sample_range_contract import PlaceRange, SampleRange

RANGES = EntryName("ledger", 0)
"""The entry of the job's ranges, in JSON."""
ranges_adapter = TypeAdapter(list[SampleRange])


def ranges_entry(ranges: Sequence[SampleRange]) -> bytes:
    return ranges_adapter.dump_json(list(ranges), exclude_unset=True)


def ledger_entry(group: int) -> bytes:
    """Args: `group` is the place of the sample among those of the request."""
    return b"%d" % group


def cursor_of(job_id: str, event: int, ledger: Mapping[EntryName, bytes]) -> JobCursor:
    """Args: `ledger` has the entries of the events up to `event`, and that of the ranges."""
    ranges = ranges_adapter.validate_json(ledger[RANGES])
    groups = sorted(int(entry) for name, entry in ledger.items() if name != RANGES)
    return JobCursor(job_id=job_id, event=event, samples_from=list(ranges_without(ranges, groups)))


def ranges_without(ranges: Iterable[SampleRange], groups: Sequence[int]) -> Iterator[SampleRange]:
    """The ranges, which leave these groups out as well.

    Args:
        groups: places among the samples of all ranges, in ascending order.
    """
    first = 0
    delivered = iter(groups)
    group = next(delivered, None)
    for drawn in ranges:
        places = list(chain.from_iterable(range(piece.start, piece.end) for piece in drawn.pieces()))
        left_out = list(chain.from_iterable(range(piece.start, piece.end) for piece in drawn.without))
        while group is not None and group < first + len(places):
            left_out.append(places[group - first])
            group = next(delivered, None)
        first += len(places)
        yield drawn.model_copy(update={"without": list(runs(sorted(left_out)))})


def runs(places: Iterable[int]) -> Iterator[PlaceRange]:
    """Those that follow one another are one range. Args: `places` ascend."""
    start = count = 0
    for place in places:
        if count and place == start + count:
            count += 1
            continue
        if count:
            yield PlaceRange(start=start, count=count)
        start, count = place, 1
    if count:
        yield PlaceRange(start=start, count=count)
