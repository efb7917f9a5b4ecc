"""Rollouts that go on all the time while weights change; each one is checked when it ends."""

from dataclasses import dataclass, field
from time import monotonic

from rollout_client import AsyncRolloutClient
from rollout_client.contract.rollouts import SampleResult, Sampling
from tests.endurance.chaos.parts import TASK_NAME
from tests.endurance.soak.span_check import span_problems
from tests.endurance.soak.version_times import VersionTimes

ROLLOUTS_A_REQUEST = 12
TURNS = 4
SAMPLING = Sampling(temperature=1.5, max_new_tokens=48, ignore_eos=True)
"""Hot enough to babble: most generations are long, and many are under way when the weights change."""
ENDED_WELL = {"completed", "truncated", "max_turns"}


@dataclass(slots=True)
class RolloutTally:
    played: int = 0
    of_several_versions: int = 0
    """How many of them have tokens of more than one version."""
    problems: list[str] = field(default_factory=list)


class SteadyRollouts:
    """Requests whose rollouts are checked.

    Args:
        sample_retries: of one rollout; with 0 a failure of the fleet is a failed rollout.
    """

    def __init__(self, client: AsyncRolloutClient, times: VersionTimes, sample_retries: int) -> None:
        self.tally = RolloutTally()
        self._client = client
        self._times = times
        self._sample_retries = sample_retries

    async def post(self, number: int) -> None:
        """One request, and the check of its rollouts. Raises a `RolloutError` that is a problem."""
        # Every other request demands what was acknowledged last.
        min_version = self._times.newest if number % 2 else 0
        begin = monotonic()
        samples = await self._client.example_samples(TASK_NAME, ROLLOUTS_A_REQUEST, seed=number)
        ended = 0
        async with self._client.stream(
            samples,
            sampling=SAMPLING,
            max_rollout_turns=TURNS,
            sample_retries=self._sample_retries,
            policy={"min_version": min_version},
        ) as rollouts:
            async for result in rollouts:
                ended += 1
                self._check(number, result, begin, min_version)
        if ended != ROLLOUTS_A_REQUEST:
            self.tally.problems.append(f"request {number}: {ended} rollouts of {ROLLOUTS_A_REQUEST} came back")

    def _check(self, number: int, result: SampleResult, begin: float, min_version: int) -> None:
        self.tally.played += 1
        problems = list(span_problems(result.message_log, self._times, begin, monotonic(), min_version))
        if result.error is not None or result.status not in ENDED_WELL:
            problems.append(f"status {result.status}: {result.error}")
        versions = {span.version for message in result.message_log for span in message.weight_versions or ()}
        self.tally.of_several_versions += len(versions) > 1
        self.tally.problems += [f"request {number}, rollout {result.idx}: {problem}" for problem in problems]
