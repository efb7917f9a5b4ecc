"""Plays one job from the begin, or from where another ingress replica lost it."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import zstandard

from deployments.jobs.records import Claim, EntryKind
from deployments.storage.storage import EntryName
from service.access.access_control import AccessControl
from service.access.keys import Caller, Scope
from service.admission.admission import AdmittedRequest
from service.jobs.cursor import RANGES, ranges_in
from service.jobs.journal import JobJournal, JobWriter
from service.problems import RequestProblem, internal_error, not_ready
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
logger = logging.getLogger("rollout_service.jobs")


class JobPlayer:
    """Plays the job of one claim.

    Guarantees: a job that this has begun ends with a summary or a problem as its last event, unless the claim is lost
    or this is cancelled; `prepared` is done before any event, with the problem if the request was refused.
    """

    def __init__(
        self,
        claim: Claim,
        rollouts: RolloutService,
        access: AccessControl,
        store: "JobStore",
        writer: JobWriter,
    ) -> None:
        self.claim = claim
        self.prepared: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rollouts = rollouts
        self._store = store
        self._journal = JobJournal(claim, writer)
        self._access = access
        self._group_size = 1

    async def play(self) -> None:
        """Raises `RequestProblem` or `RolloutFailure` if nothing could be begun; then the job is as it was."""
        rollouts = self._rollouts
        stored = await self._read([BODY])
        if BODY not in stored:
            raise not_ready("The job was deleted meanwhile")
        # What the caller's key allows now: the one that was sent may have been revoked since.
        caller = await self._access.caller_named(self.claim.record.namespace or None, SCOPE)
        body = await asyncio.to_thread(_decompressed, stored[BODY])
        with rollouts.collections.request_in_flight(), rollouts.admission.admitted(len(body), caller) as admitted:
            running = await self._begin(body, admitted, caller)
            self._set_prepared(None)
            await self._play(running)

    async def refuse(self, problem: RequestProblem) -> None:
        """Ends the job with what `play` has raised. The key of a request of which nothing was played is free again."""
        try:
            line = self._problem(problem)
            await self._journal.end(line, completed=False, forgets_key=self.claim.record.epoch == 1)
        finally:
            # The store may tell this replica that the job has ended before it answers the write: that cancels this.
            self._set_prepared(problem)

    def give_up(self) -> None:
        """Tells who waits for `prepared` that it will not be, if it is not."""
        self._set_prepared(not_ready("The job was deleted, or this replica of the service has lost it; try again"))

    async def _begin(self, body: bytes, admitted: AdmittedRequest, caller: Caller) -> RunningRollout:
        rollouts, record = self._rollouts, self.claim.record
        request = await rollouts.body_parser.parse(bytearray(body), record.media_type)
        admitted.hold_rollouts(request)
        stored = await self._read([RANGES]) if request.samples_from and record.epoch > 1 else {}
        self._group_size = request.num_generations
        if record.epoch > 1:
            await self._load()
        size = await rollouts.take_samples(request, admitted.hold_body, caller, len(body), self._journal)
        if request.samples_from:
            # Raises if the data have changed since the ranges were made, or since the job began.
            ranges = ranges_in(stored[RANGES]) if RANGES in stored else request.samples_from
            await self._journal.begin_ledger(await rollouts.task_sampler.with_revisions(ranges))
        return await rollouts.rollout(request, record.request_id, size, caller, self._journal)

    async def _play(self, running: RunningRollout) -> None:
        selected = None
        try:
            last_line = await self._play_groups(running)
            completed, selected = True, running.selected
        except RequestProblem as problem:
            last_line, completed = self._problem(problem), False
        except Exception as error:
            record = self.claim.record
            fields = {"request_id": record.request_id, "job_id": record.job_id}
            logger.exception("A job failed unexpectedly.", extra=fields)
            last_line, completed = self._problem(internal_error(error)), False
        await self._journal.end(last_line, completed, selected=selected)

    async def _play_groups(self, running: RunningRollout) -> bytes:
        """Returns the line of the summary."""
        size = self._group_size
        lines: dict[int, dict[int, bytes]] = defaultdict(dict)
        async with aclosing(running.lines(skipped=self._skipped(running))) as encoded:
            async for position, line in encoded:
                group = position // size
                lines[group][position] = line
                if len(lines[group]) == size:
                    self._add_group(running, group, lines.pop(group))
        return summary_line(await running.final_summary())

    def _skipped(self, running: RunningRollout) -> Container[int]:
        """The positions of the rollouts that an event holds."""
        if running.selected is None:
            return self._journal.in_events
        # Each event has a group, in the order of the answer.
        return range(self.claim.record.last_event * self._group_size)

    def _add_group(self, running: RunningRollout, group: int, lines: Mapping[int, bytes]) -> None:
        if running.selected is None:
            self._journal.add_group(group, lines)
            return
        place = running.place_of(group)
        self._journal.add_group(place, lines, settled_before=(place + 1) * self._group_size, kept=group + 1)

    async def _load(self) -> None:
        journal = await self._entries("journal")
        outlines = await self._entries("outline")
        await asyncio.to_thread(self._journal.load, journal, list(outlines.values()), self._group_size)

    async def _entries(self, kind: EntryKind) -> dict[EntryName, bytes]:
        names = sorted(name for name in self.claim.entries if name.kind == kind)
        entries: dict[EntryName, bytes] = {}
        for begin in range(0, len(names), READ_AT_ONCE):
            entries |= await self._read(names[begin : begin + READ_AT_ONCE])
        return entries

    async def _read(self, names: Sequence[EntryName]) -> dict[EntryName, bytes]:
        return await self._store.read(self.claim.record.job_id, names)

    def _problem(self, problem: RequestProblem) -> bytes:
        return problem_line(problem, self.claim.record.request_id)

    def _set_prepared(self, problem: RequestProblem | None) -> None:
        if self.prepared.done():
            return
        if problem is None:
            self.prepared.set_result(None)
        else:
            self.prepared.set_exception(problem)


def compressed_body(body: bytes | bytearray) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(bytes(body))


def _decompressed(body: bytes) -> bytes:
    """Reverses `compressed_body`."""
    return zstandard.ZstdDecompressor().decompress(body)
