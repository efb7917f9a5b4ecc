"""Plays one job from the begin, or from where another ingress replica lost it."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import zstandard

from deployments.jobs.records import Claim, EntryKind, JobWrite
from deployments.storage.storage import EntryName
from service.access.access_control import AccessControl
from service.access.keys import Scope
from service.jobs.codec import RANGES, ranges_in
from service.jobs.journal import JobJournal, JobWriter
from service.problems import RequestProblem, not_ready
from service.rollout_requests.result_encoding import problem_line, summary_line
from service.rollout_requests.rollout_service import RolloutService
from service.rollout_requests.running_rollout import RunningRollout

if TYPE_CHECKING:
    from deployments.jobs.store import JobStore

BODY = EntryName("body", 0)
READ_AT_ONCE = 256
"""Entries of a journal that are read in one call."""
SCOPE: Scope = "rollout"
"""The scope that the key of a job must have when the job begins, and when it is resumed."""


class JobPlayer:
    """Plays the job of one claim.

    Guarantees: a job that this has begun ends with a summary or a problem as its last event, if `fail` is called with
    what `play` raises, unless the claim is lost or this is cancelled; `prepared` is done before any event, with the
    problem if the request was refused.
    """

    task: "asyncio.Task[None]"
    """Set by the runner when it starts the player."""

    def __init__(
        self, claim: Claim, rollouts: RolloutService, access: AccessControl, store: "JobStore", writer: JobWriter
    ) -> None:
        self.claim = claim
        self.prepared: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rollouts = rollouts
        self._store = store
        self._writer = writer
        self._access = access
        self._journal: JobJournal | None = None
        """Set when the run begins."""

    async def play(self) -> None:
        """Raises what refuses the request, or breaks its run: the job is then as it was before that."""
        rollouts, record = self._rollouts, self.claim.record
        stored = await self._read([BODY])
        if BODY not in stored:
            raise not_ready("The job was deleted meanwhile")
        # What the caller's key allows now: the one that was sent may have been revoked since.
        caller = await self._access.caller_named(record.namespace or None, SCOPE)
        body = await asyncio.to_thread(zstandard.ZstdDecompressor().decompress, stored[BODY])
        with rollouts.collections.request_in_flight(), rollouts.admission.admitted(len(body), caller) as admitted:
            request = await rollouts.body_parser.parse(bytearray(body), record.media_type)
            admitted.hold_rollouts(request)
            journal = JobJournal(self.claim, self._writer, request.num_generations)
            if record.epoch > 1:
                outlines = (await self._read_all("outline")).values()
                await asyncio.to_thread(journal.load, await self._read_all("journal"), outlines)
            size = await rollouts.take_samples(request, admitted.hold_body, caller, len(body), journal)
            if request.samples_from:
                ranges = request.samples_from
                if RANGES in self.claim.entries:
                    ranges = ranges_in((await self._read([RANGES]))[RANGES])
                # Raises if the data have changed since the ranges were made, or since the job began.
                await journal.begin_ledger(await rollouts.task_sampler.with_revisions(ranges))
            running = await rollouts.rollout(request, record.request_id, size, caller, journal)
            self._journal = journal
            self._set_prepared(None)
            last_line = await self._play_groups(running, journal, request.num_generations)
            await journal.end(last_line, "completed", running.selected)

    async def fail(self, problem: RequestProblem) -> None:
        """Ends the job with what `play` has raised. A request of which nothing was played is forgotten with its key."""
        record = self.claim.record
        try:
            if not self.has_begun and record.epoch == 1:
                await self._writer.write(JobWrite(record.job_id, record.epoch, ended="refused"))
            else:
                journal = self._journal or JobJournal(self.claim, self._writer, group_size=1)
                await journal.end(problem_line(problem, record.request_id), "failed", None)
        finally:
            # The store may tell this replica that the job has ended before it answers the write: that cancels this.
            self._set_prepared(problem)

    @property
    def has_begun(self) -> bool:
        return self._journal is not None

    def give_up(self) -> None:
        """Tells who waits for `prepared` that it will not be, if it is not."""
        self._set_prepared(not_ready("The job was deleted, or this replica of the service has lost it; try again"))

    async def _play_groups(self, running: RunningRollout, journal: JobJournal, size: int) -> bytes:
        """Returns the line of the summary."""
        is_selecting = running.selected is not None
        # Each event of a job that selects groups has one, in the order of the answer.
        in_events = range(self.claim.record.last_event * size) if is_selecting else journal.in_events
        groups: dict[int, dict[int, bytes]] = defaultdict(dict)
        async with aclosing(running.lines(skipped=in_events)) as encoded:
            async for position, line in encoded:
                group = position // size
                groups[group][position] = line
                if len(groups[group]) == size:
                    place = running.place_of(group)
                    journal.add_group(place, groups.pop(group), (place + 1, group + 1) if is_selecting else None)
        return summary_line(await running.final_summary())

    async def _read_all(self, kind: EntryKind) -> dict[EntryName, bytes]:
        names = sorted(name for name in self.claim.entries if name.kind == kind)
        entries: dict[EntryName, bytes] = {}
        for begin in range(0, len(names), READ_AT_ONCE):
            entries |= await self._read(names[begin : begin + READ_AT_ONCE])
        return entries

    async def _read(self, names: Sequence[EntryName]) -> dict[EntryName, bytes]:
        return await self._store.read(self.claim.record.job_id, names)

    def _set_prepared(self, problem: RequestProblem | None) -> None:
        if self.prepared.done():
            return
        if problem is None:
            self.prepared.set_result(None)
        else:
            self.prepared.set_exception(problem)


def compressed_body(body: bytes | bytearray) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(bytes(body))
