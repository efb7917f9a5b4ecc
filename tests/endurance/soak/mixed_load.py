"""Requests of every kind at once: streams, whole answers, scores, jobs, agents, and clients that go away."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from random import Random
from time import monotonic
from typing import Any

from rollout_client import AsyncRolloutClient
from rollout_client.contract.rollouts import SampleResult, Sampling
from rollout_client.errors import StreamBroken
from tests.endurance.chaos.parts import TASK_NAME
from tests.endurance.soak.callers import Post
from tests.endurance.soak.session_load import SessionLoad
from tests.endurance.soak.span_check import span_problems
from tests.endurance.soak.version_times import VersionTimes

MATH = "math"
MATH_SAMPLING = Sampling(max_new_tokens=32)
SAMPLING = Sampling(temperature=1.5, max_new_tokens=48, ignore_eos=True)
"""Hot enough to babble: most generations are long, and many are under way when the weights change."""
OF_TASK: dict[str, Any] = {"sampling": SAMPLING, "max_rollout_turns": 4}
ENDED_WELL = {"completed", "truncated", "max_turns"}
STREAMED_SAMPLES = 12
SAMPLES = 6
GENERATIONS = 2
SAMPLE_RETRIES = 16
"""A killed replica costs every rollout that it plays one, and those that follow may be tried before it is noticed."""
IN_GROUPS: dict[str, Any] = {"num_generations": GENERATIONS, "sample_retries": SAMPLE_RETRIES}
SEQUENCES = 8
LONGEST_SEQUENCE = 256
LONGEST_STAY_S = 1.5
"""Of a client that goes away."""
DELETED_JOBS = 3
"""One of so many jobs is deleted while it runs."""


class MixedLoad:
    """Counts the requests that ended well, by their kind, and keeps what was wrong with others.

    Args:
        url: the service's address.
        times: of the versions that are pushed meanwhile; tokens of streamed rollouts are held against them.
        stream_retries: of one streamed rollout; with 0 a failure of the fleet is a failed rollout.
    """

    def __init__(self, client: AsyncRolloutClient, url: str, times: VersionTimes, stream_retries: int) -> None:
        self.ended: Counter[str] = Counter()
        self.problems: list[str] = []
        self._client = client
        self._times = times
        self._stream_retries = stream_retries
        sessions = SessionLoad(client, url, self.ended, self.problems)
        own = (self._stream, self._stream, self._math, self._score, self._go_away, self._job)
        self.posts: list[Post] = [*own, sessions.session, sessions.leave_call]
        """What the callers do, each one thing."""

    async def _stream(self, number: int) -> None:
        # Every other request demands what was acknowledged last.
        min_version = self._times.newest if number % 2 else 0
        begin, name, results = monotonic(), f"stream {number}", list[SampleResult]()
        samples = await self._client.example_samples(TASK_NAME, STREAMED_SAMPLES, seed=number)
        try:
            options: Any = {"sample_retries": self._stream_retries, "policy": {"min_version": min_version}}
            async with self._client.stream(samples, **OF_TASK, **options) as rollouts:
                async for result in rollouts:
                    results.append(result)
                    wrong = span_problems(result.message_log, self._times, begin, monotonic(), min_version)
                    self.problems += [f"{name}, rollout {result.idx}: {problem}" for problem in wrong]
        except StreamBroken:
            # A stream goes through one ingress replica, and ends with it.
            self._check(name, results, len(results))
            self.ended["broken streams"] += 1
        else:
            self._check(name, results, STREAMED_SAMPLES)
            self.ended["streams"] += 1

    async def _math(self, number: int) -> None:
        samples = await self._client.example_samples(MATH, SAMPLES, seed=number)
        answer = await self._client.rollout(samples, **IN_GROUPS, sampling=MATH_SAMPLING, idempotency_key="auto")
        self._check(f"request {number}", answer.samples, SAMPLES * GENERATIONS)
        self.ended["whole answers"] += 1

    async def _score(self, number: int) -> None:
        draw = Random(number)
        vocabulary = (await self._client.info()).model.vocab_size
        lengths = [draw.randint(2, LONGEST_SEQUENCE) for _ in range(SEQUENCES)]
        sequences = [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]
        scored = (await self._client.score(sequences, sequence_retries=SAMPLE_RETRIES)).scores
        self.problems += [f"score {number}: {score.error}" for score in scored if score.error is not None]
        self.ended["scores"] += 1

    async def _go_away(self, number: int) -> None:
        samples = await self._client.example_samples(TASK_NAME, SAMPLES, seed=number)
        try:
            async with asyncio.timeout(Random(number).uniform(0, LONGEST_STAY_S)):
                if number % 2:
                    await self._client.rollout(samples, **OF_TASK)
                async with self._client.stream(samples, **OF_TASK) as rollouts:
                    await anext(aiter(rollouts), None)
        except (TimeoutError, StreamBroken):
            pass
        self.ended["clients that went away"] += 1

    async def _job(self, number: int) -> None:
        samples = await self._client.example_samples(TASK_NAME, SAMPLES, seed=number)
        job = await self._client.jobs.submit(samples, **OF_TASK, **IN_GROUPS)
        results: list[SampleResult] = []
        async with aclosing(self._client.jobs.events(job.job_id)) as events:
            async for event in events:
                if event.problem is not None:
                    self.problems.append(f"job {number}: {event.problem}")
                results += [positioned.sample for positioned in event.samples]
                await self._client.jobs.acknowledge(job.job_id, event.event)
                if number % DELETED_JOBS == 0:
                    break
            else:
                self._check(f"job {number}", results, SAMPLES * GENERATIONS)
        await self._client.jobs.delete(job.job_id)
        self.ended["jobs"] += 1

    def _check(self, name: str, results: Sequence[SampleResult], expected: int) -> None:
        self.problems += [
            f"{name}, rollout {result.idx}: status {result.status}: {result.error}"
            for result in results
            if result.error is not None or result.status not in ENDED_WELL
        ]
        if len(results) != expected:
            self.problems.append(f"{name}: {len(results)} rollouts of {expected} came back")
