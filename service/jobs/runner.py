"""The jobs of one ingress replica: those that were posted here, and those that other replicas have lost.

A job is played from its beginning, or from where another ingress replica lost it.
"""

import asyncio
import logging
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from contextvars import Context
from typing import TYPE_CHECKING
from uuid import uuid4

import zstandard

from deployments.failures import RolloutFailure, StoreLost
from deployments.jobs.records import BODY, Claim, EntryKind, JobRequest, JobWrite, OpenedJob
from deployments.policy.failures import PolicyFailure
from deployments.rpc.background_tasks import until_back
from deployments.storage.storage import EntryName
from service.access.access_control import AccessControl
from service.access.keys import Scope
from service.jobs.codec import RANGES, ranges_in
from service.jobs.journal import JobJournal, JobWriter
from service.problems import OVERLOADED, RequestProblem, internal_error, not_ready, problem_of, refused_for_now
from service.rollout_requests.result_encoding import problem_line, summary_line
from service.rollout_requests.rollout_service import RolloutService
from service.rollout_requests.running_rollout import RunningRollout

if TYPE_CHECKING:
    from deployments.jobs.store import JobStore

READ_AT_ONCE = 256
"""Entries of a journal that are read in one call."""
SCOPE: Scope = "rollout"
"""The scope that the key of a job must have when the job begins, and when it is resumed."""
TRY_AGAIN_S = 0.5
"""Pause before another attempt for a job that had no room here, and before a lost store is asked again."""
MOST_GATHERING = 16
"""Most callers that gather the answer of one job at once: each holds all of it."""
GATHERED_RETRY_AFTER_S = 5
logger = logging.getLogger("rollout_service.jobs")


class JobRunner:
    """Polls the store for commands from its construction on, for the life of this replica.

    Guarantee: a job is played by this replica only while the store says that it is this replica's, as far as that can
    be known: one that was lost is cancelled as soon as the store is heard.
    """

    def __init__(self, store: "JobStore", rollouts: RolloutService, access: AccessControl, max_body_bytes: int) -> None:
        self.store = store
        self.max_body_bytes = max_body_bytes
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex}"
        """Host, process id, and a part that differs from an earlier process of this id."""
        self._rollouts = rollouts
        self._access = access
        self._writer = JobWriter(store, self.owner, self._cancel)
        self._players: dict[str, _JobPlayer] = {}
        self._gathering: Counter[str] = Counter()
        """Callers that gather the answer of a job, by its id."""
        self._is_closing = False
        self._closing: asyncio.Task[None] | None = None
        commands = until_back(self._follow_commands, Exception, TRY_AGAIN_S, _log_lost_commands)
        self._following = asyncio.create_task(commands, context=Context())

    async def open(self, request: JobRequest, body: bytes) -> OpenedJob:
        """The job of the request. Plays it if it is new; then returns when it is prepared.

        A caller that goes away leaves the job: it is played all the same.

        Raises:
            JobFailure: the store refuses it.
            StoreLost: the store does not answer.
            RequestProblem: a new job was refused; it is kept no longer under its key.
        """
        opened = await asyncio.shield(
            asyncio.create_task(self.store.open(request, self.owner, body), context=Context())
        )
        if opened.claim is not None:
            await asyncio.shield(self._play(opened.claim).prepared)
        return opened

    @contextmanager
    def gathering(self, job_id: str) -> Iterator[None]:
        """While a caller holds the whole answer of a job. Raises `RequestProblem` (429) if too many do."""
        if self._gathering[job_id] >= MOST_GATHERING:
            message = f"{MOST_GATHERING} callers wait for the answer of this key here; try again, or ask for a stream"
            raise refused_for_now(OVERLOADED, message, GATHERED_RETRY_AFTER_S)
        self._gathering[job_id] += 1
        try:
            yield
        finally:
            self._gathering[job_id] -= 1
            if not self._gathering[job_id]:
                del self._gathering[job_id]

    def hand_over(self, _bound_s: float) -> None:
        """Serve shuts this replica down."""
        self._closing = asyncio.create_task(self.close())

    async def close(self) -> None:
        """Gives all jobs up: another replica goes on with them, at the turns where they are."""
        self._is_closing = True
        self._following.cancel()
        job_ids = list(self._players)
        for player in self._players.values():
            player.task.cancel()
        await self._release(job_ids)

    async def _release(self, job_ids: list[str]) -> None:
        try:
            await self.store.release(self.owner, job_ids)
        except StoreLost as lost:
            logger.warning("Jobs cannot be handed over; others take them when the lease has run out: %s", lost)

    def _play(self, claim: Claim) -> "_JobPlayer":
        job_id = claim.record.job_id
        player = _JobPlayer(claim, self._rollouts, self._access, self.store, self._writer)
        # An empty context: Serve ends the calls of a request that its caller has left, and a job goes on.
        # Its exception is looked at where somebody waits for it, if anybody does.
        player.prepared.add_done_callback(lambda prepared: prepared.cancelled() or prepared.exception())
        player.task = asyncio.create_task(self._played(player), context=Context())
        if (before := self._players.get(job_id)) is not None:
            before.task.cancel()
        self._players[job_id] = player
        player.task.add_done_callback(lambda _: self._forget(player))
        return player

    async def _played(self, player: "_JobPlayer") -> None:
        record = player.claim.record
        try:
            await player.play()
        except (RequestProblem, RolloutFailure, PolicyFailure) as error:
            problem = problem_of(error)
            may_pass = problem.problem.status in (429, 503) and player.journal is None
            if record.epoch > 1 and may_pass:
                logger.info("A job cannot go on here now: %s", problem, extra={"job_id": record.job_id})
                await asyncio.sleep(TRY_AGAIN_S)
                await self._release([record.job_id])
            else:
                await player.fail(problem)
        except Exception as error:
            fields = {"request_id": record.request_id, "job_id": record.job_id}
            logger.exception("A job failed unexpectedly.", extra=fields)
            await player.fail(internal_error(error))
        finally:
            player.give_up()

    def _forget(self, player: "_JobPlayer") -> None:
        job_id = player.claim.record.job_id
        if self._players.get(job_id) is player:
            del self._players[job_id]
        if not player.task.cancelled() and (error := player.task.exception()) is not None:
            logger.error("A job broke off.", exc_info=error, extra={"job_id": job_id})

    def _cancel(self, job_id: str, epoch: int) -> None:
        """Cancels what plays the job since it was given to this replica for this epoch, and not for a later one."""
        if (player := self._players.get(job_id)) is not None and player.claim.record.epoch <= epoch:
            player.task.cancel()

    async def _follow_commands(self) -> None:
        epochs = {job_id: player.claim.record.epoch for job_id, player in self._players.items()}
        commands = await self.store.poll(self.owner, list(epochs))
        for job_id in commands.lost:
            self._cancel(job_id, epochs[job_id])
        claimed = 0
        for job_id in commands.waiting:
            if job_id in self._players or self._is_closing:
                continue
            if (claim := await self.store.claim(job_id, self.owner)) is not None:
                logger.info("A job goes on here.", extra={"job_id": job_id, "request_id": claim.record.request_id})
                self._play(claim)
                claimed += 1
        if commands.waiting and not claimed:
            # They are the ones for which there is no room here.
            await asyncio.sleep(TRY_AGAIN_S)


class _JobPlayer:
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
        self.journal: JobJournal | None = None
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
            request = await rollouts.body_parser.parse(bytearray(body))
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
            self.journal = journal
            self._set_prepared(None)
            last_line = await self._play_groups(running, journal, request.num_generations)
            await journal.end(last_line, "completed", running.selected)

    async def fail(self, problem: RequestProblem) -> None:
        """Ends the job with what `play` has raised. A request of which nothing was played is forgotten with its key."""
        record = self.claim.record
        try:
            if self.journal is None and record.epoch == 1:
                await self._writer.write(JobWrite(record.job_id, record.epoch, ended="refused"))
            else:
                journal = self.journal or JobJournal(self.claim, self._writer, group_size=1)
                await journal.end(problem_line(problem, record.request_id), "failed", None)
        finally:
            # The store may tell this replica that the job has ended before it answers the write: that cancels this.
            self._set_prepared(problem)

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


def _log_lost_commands(failure: Exception, is_first: bool) -> None:
    if is_first:
        logger.warning("The commands of the job store cannot be followed, trying again.", exc_info=failure)
