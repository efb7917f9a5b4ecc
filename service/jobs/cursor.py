"""Which samples of a job's data set were delivered, which of their groups have failed, and what is left. No I/O.

A group has failed when none of its rollouts was played to its end: nothing of it can be trained on.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from pydantic import TypeAdapter

from deployments.storage.storage import EntryName
from rollout_client.contract.jobs import JobCursor
from rollout_client.contract.rollouts import SampleStatus
from rollout_client.contract.sample_ranges import PlaceRange, SampleRange, moved_past

RANGES = EntryName("ledger", 0)
"""The entry of the job's ranges, in JSON."""
PLAYED: frozenset[SampleStatus | None] = frozenset(("completed", "truncated", "max_turns"))
"""The statuses of rollouts that were played to their ends."""
FAILED = b" failed"
"""Follows the place of a group that has failed."""
KEPT = b" kept "
"""Stands in the entry of a job that selects groups, between how many samples were drawn and how many groups kept."""
ranges_adapter = TypeAdapter(list[SampleRange])


def ranges_entry(ranges: Sequence[SampleRange]) -> bytes:
    return ranges_adapter.dump_json(list(ranges), exclude_unset=True)


def ranges_in(entry: bytes) -> list[SampleRange]:
    return ranges_adapter.validate_json(entry)


def ledger_entry(group: int, statuses: Iterable[SampleStatus | None]) -> bytes:
    """The entry of a delivered group.

    Args:
        group: the place of the sample among those of the request.
        statuses: the statuses of its rollouts.
    """
    return b"%d%s" % (group, FAILED if PLAYED.isdisjoint(statuses) else b"")


def selection_entry(drawn: int, kept: int) -> bytes:
    """The entry of an event of a job that selects groups, which delivers them in the order of their samples.

    Args:
        drawn: how many samples were drawn and judged up to it.
        kept: how many groups the events up to it have.
    """
    return b"%d%s%d" % (drawn, KEPT, kept)


def cursor_of(job_id: str, event: int, ledger: Mapping[EntryName, bytes]) -> JobCursor:
    """The cursor after `event`. `ledger` has the entries of the events up to it, and that of the ranges."""
    ranges = ranges_in(ledger[RANGES])
    entries = [entry for name, entry in ledger.items() if name != RANGES]
    if entries and KEPT in entries[0]:
        drawn, kept = max(tuple(map(int, entry.split(KEPT))) for entry in entries)
        return JobCursor(job_id=job_id, event=event, samples_from=moved_past(ranges, drawn), kept=kept)
    delivered = sorted(int(entry.removesuffix(FAILED)) for entry in entries)
    failed = sorted(int(entry.removesuffix(FAILED)) for entry in entries if entry.endswith(FAILED))
    return JobCursor(
        job_id=job_id,
        event=event,
        samples_from=list(ranges_without(ranges, delivered)),
        failed=list(ranges_of(ranges, failed)),
    )


def ranges_without(ranges: Iterable[SampleRange], groups: Sequence[int]) -> Iterator[SampleRange]:
    """The ranges, which leave these groups out as well. Args: as `with_places`."""
    for drawn, places in with_places(ranges, groups):
        before = chain.from_iterable(range(piece.start, piece.end) for piece in drawn.without)
        yield drawn.model_copy(update={"without": list(runs(sorted([*before, *places])))})


def ranges_of(ranges: Iterable[SampleRange], groups: Sequence[int]) -> Iterator[SampleRange]:
    """These groups alone, as parts of their ranges. Args: as `with_places`."""
    for drawn, places in with_places(ranges, groups):
        if places:
            start, end = places[0], places[-1] + 1
            others = sorted(set(range(start, end)).difference(places))
            yield drawn.model_copy(update={"start": start, "count": end - start, "without": list(runs(others))})


def with_places(ranges: Iterable[SampleRange], groups: Sequence[int]) -> Iterator[tuple[SampleRange, list[int]]]:
    """Each range with the places in it of its groups.

    Args:
        groups: places among the samples of all ranges, in ascending order.
    """
    first = 0
    following = iter(groups)
    group = next(following, None)
    for drawn in ranges:
        of_range = list(chain.from_iterable(range(piece.start, piece.end) for piece in drawn.pieces()))
        places = list[int]()
        while group is not None and group < first + len(of_range):
            places.append(of_range[group - first])
            group = next(following, None)
        first += len(of_range)
        yield drawn, places


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
