"""Rounds in which agents with sessions are at work, something of theirs is killed, and their records are read."""

import asyncio
import random
import signal
import sys
from asyncio.subprocess import Process
from pathlib import Path
from time import monotonic

import httpx

from rollout_client import AsyncRolloutClient
from rollout_client.contract.sessions import SessionSample, SessionSamples
from tests.endurance.chaos.one_machine import OneMachine
from tests.endurance.chaos.parts import KILLED
from tests.endurance.chaos.sessions.records import answered, problems_of, responses_in
from tests.endurance.chaos.sessions.results import SessionRound
from tests.endurance.chaos.sessions.service import calls_in_flight

AGENT = Path(__file__).parent / "endless_agent.py"
KINDS = ("agent", "ingress", "generator")
SESSIONS = 10
BEGUN_WITHIN_S = 120.0
WHOLE_WITHIN_S = 300.0
QUIET_WITHIN_S = 30.0
LATEST_STRIKE_S = 4.0
GO_ON_S = 2.0
"""After a replica was killed, its agents go on for so long."""
POLL_S = 0.05
READ_WITHIN_S = 90.0


class NotBegun(Exception):
    """Not all agents were at work in time."""


class SessionRounds:
    def __init__(self, service: OneMachine, client: AsyncRolloutClient, answers: Path, draw: random.Random) -> None:
        """Args: `answers` is the folder that the agents write to."""
        self._service = service
        self._client = client
        self._answers = answers
        self._draw = draw
        self._agents: list[Process] = []

    async def play(self, kind: str) -> SessionRound:
        """Raises `NotBegun`."""
        await self._until_whole()
        try:
            await self._begin()
            await asyncio.sleep(self._draw.uniform(0, LATEST_STRIKE_S))
            return await self._struck(kind)
        finally:
            await self._kill_agents()
            await self._seconds_until_quiet()
            self._agents.clear()
            for file in self._answers.iterdir():
                file.unlink()

    async def _until_whole(self) -> None:
        async with asyncio.timeout(WHOLE_WITHIN_S):
            while not all([await self._service.is_whole(kind) for kind in ("ingress", "generator")]):
                await asyncio.sleep(1)

    async def _begin(self) -> None:
        for _ in range(SESSIONS):
            session = self._client.session()
            await session.__aenter__()
            command = [
                sys.executable,
                "-S",
                str(AGENT),
                str(self._answers),
                session.anthropic_base_url,
                session.api_key,
            ]
            self._agents.append(await asyncio.create_subprocess_exec(*command))
        until = monotonic() + BEGUN_WITHIN_S
        while sum(bool(file.stat().st_size) for file in self._answers.iterdir()) < SESSIONS:
            if monotonic() > until:
                raise NotBegun(f"{len(list(self._answers.iterdir()))} of {SESSIONS} agents were at work")
            await asyncio.sleep(POLL_S)

    def _alive(self) -> list[Process]:
        return [agent for agent in self._agents if agent.returncode is None]

    async def _kill_agents(self) -> None:
        for agent in self._alive():
            agent.kill()
            await agent.wait()

    async def _struck(self, kind: str) -> SessionRound:
        if kind == "agent":
            await self._kill_agents()
        else:
            self._draw.choice(KILLED[kind].processes()).kill()
        quiet_after_s = await self._seconds_until_quiet()
        if kind != "agent":
            await asyncio.sleep(GO_ON_S)
            for agent in self._alive():
                agent.send_signal(signal.SIGSTOP)
        done = SessionRound(kind=kind, sessions=SESSIONS, quiet_after_s=quiet_after_s)
        await self._read(done)
        return done

    async def _seconds_until_quiet(self) -> float | None:
        """Until the engines have at most one call of each agent that lives."""
        began = monotonic()
        while monotonic() - began < QUIET_WITHIN_S:
            asked_at = monotonic()
            if await asyncio.to_thread(calls_in_flight) <= len(self._alive()):
                return round(asked_at - began, 2)
            await asyncio.sleep(POLL_S)
        return None

    async def _read(self, done: SessionRound) -> None:
        """Compares what was recorded with what the agents were answered."""
        for file in self._answers.iterdir():
            said = answered(file.read_text())
            samples = await self._samples(file.name)
            recorded = [one for sample in samples for one in responses_in(sample.message_log, sample.shared_messages)]
            done.readable += 1
            done.answered += len(said.responses)
            done.recorded += len(recorded)
            done.errors += problems_of(file.name, said, recorded)

    async def _samples(self, session_id: str) -> list[SessionSample]:
        """Raises `httpx.HTTPError` if nobody answers within `READ_WITHIN_S`."""
        until = monotonic() + READ_WITHIN_S
        async with httpx.AsyncClient(base_url=self._service.url, timeout=READ_WITHIN_S) as http:
            while True:
                try:
                    answer = await http.get(f"/v1/sessions/{session_id}/samples")
                    return SessionSamples.model_validate_json(answer.raise_for_status().content).samples
                except httpx.HTTPError:
                    if monotonic() > until:
                        raise
                    await asyncio.sleep(POLL_S)
