"""Rounds in which agents with sessions are at work, something of theirs is killed, and their records are read."""

import asyncio
import json
import random
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import httpx
import psutil

from benchmarks.process_group import send
from rollout_client import AsyncRolloutClient
from rollout_client.calls.async_client.sessions import AsyncSession
from rollout_client.contract.sessions import SessionSample, SessionSamples
from rollout_client.json_lines import numbered_lines
from tests.endurance.chaos.one_machine import OneMachine
from tests.endurance.chaos.parts import KILLED
from tests.endurance.chaos.sessions.records import answered, problems_of, recorded_of_rollout, responses_in
from tests.endurance.chaos.sessions.results import SessionRound
from tests.endurance.chaos.sessions.service import AGENT, TASK_NAME, agents, calls_in_flight

CLIENT = Path(__file__).parent / "rollouts_client.py"
PROGRAMS: Mapping[str, int] = {"agent": 10, "command": 0, "client": 0, "ingress": 5, "generator": 5}
"""By kind, of the ten: sessions with a program of their own. The others are of rollouts of a task with an agent."""
SESSIONS = 10
BEGUN_WITHIN_S = 120.0
WHOLE_WITHIN_S = 300.0
QUIET_WITHIN_S = 30.0
LATEST_STRIKE_S = 4.0
GO_ON_S = 2.0
"""After a replica was killed, its agents go on for so long."""
POLL_S = 0.05
READ_WITHIN_S = 90.0
NOT_FOUND = 404


class NotBegun(Exception):
    """Not all agents were at work in time."""


@dataclass(slots=True)
class AtWork:
    """The processes of one round."""

    answers: Path
    results: Path
    sessions: list[AsyncSession] = field(default_factory=list)
    programs: list[Process] = field(default_factory=list)
    client: Process | None = None

    def has_client(self) -> bool:
        return self.client is not None and self.client.returncode is None

    def kill_all(self) -> None:
        for process in (*self.programs, *([self.client] if self.client else [])):
            with suppress(ProcessLookupError):
                process.kill()


class SessionRounds:
    def __init__(self, service: OneMachine, client: AsyncRolloutClient, answers: Path, draw: random.Random) -> None:
        """Args: `answers` is the folder that the service's agents write to."""
        self._service = service
        self._client = client
        self._answers = answers
        self._draw = draw

    async def play(self, kind: str) -> SessionRound:
        """Raises `NotBegun`."""
        await self._until_whole()
        with tempfile.TemporaryDirectory(prefix="results-") as folder:
            at_work = AtWork(self._answers, Path(folder, "results"))
            try:
                await self._begin(kind, at_work)
                await asyncio.sleep(self._draw.uniform(0, LATEST_STRIKE_S))
                return await self._struck(kind, at_work)
            finally:
                at_work.kill_all()
                await self._seconds_until_quiet(at_work, are_agents_dead=True)
                for file in self._answers.iterdir():
                    file.unlink()

    async def _until_whole(self) -> None:
        async with asyncio.timeout(WHOLE_WITHIN_S):
            while not all([await self._service.is_whole(kind) for kind in ("ingress", "generator")]):
                await asyncio.sleep(1)

    async def _begin(self, kind: str, at_work: AtWork) -> None:
        for _ in range(PROGRAMS[kind]):
            session = self._client.sessions.open()
            await session.__aenter__()
            at_work.sessions.append(session)
            arguments = [str(self._answers), session.anthropic_base_url, session.api_key]
            at_work.programs.append(await started(AGENT, *arguments))
        if others := SESSIONS - PROGRAMS[kind]:
            at_work.client = await started(
                CLIENT, self._service.url, TASK_NAME, str(others), str(at_work.results), stdout=DEVNULL
            )
        until = monotonic() + BEGUN_WITHIN_S
        while sum(bool(file.stat().st_size) for file in self._answers.iterdir()) < SESSIONS:
            if monotonic() > until:
                raise NotBegun(f"{len(list(self._answers.iterdir()))} of {SESSIONS} agents were at work")
            await asyncio.sleep(POLL_S)

    async def _struck(self, kind: str, at_work: AtWork) -> SessionRound:
        self._strike(kind, at_work)
        quiet_after_s = await self._seconds_until_quiet(at_work, are_agents_dead=kind in ("agent", "command"))
        if kind in KILLED:
            await asyncio.sleep(GO_ON_S)
            for process in self._processes(at_work):
                send(process, signal.SIGSTOP)
        done = SessionRound(kind=kind, sessions=SESSIONS, quiet_after_s=quiet_after_s)
        await self._read(kind, at_work, done)
        return done

    def _strike(self, kind: str, at_work: AtWork) -> None:
        match kind:
            case "agent":
                at_work.kill_all()
            case "command":
                for process in agents():
                    send(process, signal.SIGKILL)
            case "client":
                assert at_work.client is not None
                at_work.client.kill()
            case _:
                self._draw.choice(KILLED[kind].processes()).kill()

    def _processes(self, at_work: AtWork) -> list[psutil.Process]:
        return [*agents(), *(psutil.Process(one.pid) for one in at_work.programs if one.returncode is None)]

    async def _seconds_until_quiet(self, at_work: AtWork, are_agents_dead: bool = False) -> float | None:
        """Until the engines have at most one call of each session whose agent has somebody who waits."""
        began = monotonic()
        while monotonic() - began < QUIET_WITHIN_S:
            asked_at = monotonic()
            found = await asyncio.to_thread(calls_in_flight)
            has_client = at_work.has_client() and not are_agents_dead
            programs = [] if are_agents_dead else [one for one in at_work.programs if one.returncode is None]
            allowed = len(programs) + has_client * (SESSIONS - len(at_work.programs))
            if found <= allowed and (has_client or not agents()):
                return round(asked_at - began, 2)
            await asyncio.sleep(POLL_S)
        return None

    async def _read(self, kind: str, at_work: AtWork, done: SessionRound) -> None:
        """Compares what was recorded with what the agents were answered."""
        own = {session.id for session in at_work.sessions}
        if kind == "command":
            await self._read_results(at_work, done)
            return
        for file in self._answers.iterdir():
            said = answered(file.read_text())
            done.answered += len(said.responses)
            samples = await self._samples(file.name)
            if samples is None:
                # The session of a rollout ends with its client.
                done.deleted += 1
                if file.name in own or kind != "client":
                    done.errors.append(f"{file.name}: its record is gone")
                continue
            recorded = [one for sample in samples for one in responses_in(sample.message_log, sample.shared_messages)]
            done.readable += 1
            done.recorded += len(recorded)
            done.errors += problems_of(file.name, said, recorded)

    async def _read_results(self, at_work: AtWork, done: SessionRound) -> None:
        """The sessions of rollouts end with them: their records are the results."""
        assert at_work.client is not None
        async with asyncio.timeout(READ_WITHIN_S):
            await at_work.client.wait()
        with at_work.results.open("rb") as lines:
            results = [json.loads(line) for _, line in numbered_lines(lines)]
        of_results = [recorded_of_rollout(result) for result in results]
        for file in self._answers.iterdir():
            said = answered(file.read_text())
            done.answered += len(said.responses)
            recorded = next((one for one in of_results if set(said.responses) <= set(one)), [])
            done.readable += bool(recorded)
            done.recorded += len(recorded)
            done.errors += problems_of(file.name, said, recorded)

    async def _samples(self, session_id: str) -> list[SessionSample] | None:
        """`None` for a session that is not there. Raises `httpx.HTTPError` if nobody answers within `READ_WITHIN_S`."""
        until = monotonic() + READ_WITHIN_S
        async with httpx.AsyncClient(base_url=self._service.url, timeout=READ_WITHIN_S) as http:
            while True:
                try:
                    answer = await http.get(f"/v1/sessions/{session_id}/samples")
                    if answer.status_code == NOT_FOUND:
                        return None
                    return SessionSamples.model_validate_json(answer.raise_for_status().content).samples
                except httpx.HTTPError:
                    if monotonic() > until:
                        raise
                    await asyncio.sleep(POLL_S)


async def started(script: Path, *arguments: str, stdout: int | None = None) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-S", str(script), *arguments, stdout=stdout)
