"""Whether all replicas hold the newest version once nothing is under way, and generate with its weights."""

import asyncio
from time import monotonic
from typing import Any

from benchmarks.reference_model import State, differences
from rollout_client import AsyncRolloutClient
from rollout_client.contract.policy import PolicyState
from rollout_client.contract.rollouts import Sampling
from tests.endurance.chaos.parts import TASK_NAME
from tests.endurance.soak.known_weights import KnownWeights

SETTLED_WITHIN_S = 240.0
POLL_S = 1.0
ROLLOUTS = 8
TURNS = 2
SAMPLING = Sampling(greedy=True, max_new_tokens=32, ignore_eos=True)
TOLERANCE = 0.02
"""Of the mean difference: what bfloat16 rounds differently in other batches."""


async def problems_at_the_end(client: AsyncRolloutClient, newest: int) -> list[str]:
    """What is not as it should be when version `newest` was acknowledged last."""
    until = monotonic() + SETTLED_WITHIN_S
    while True:
        problems = _problems(await client.policy.state(checksums_within_s=POLL_S), newest)
        if not problems or monotonic() > until:
            return problems
        await asyncio.sleep(POLL_S)


def _problems(state: PolicyState, newest: int) -> list[str]:
    problems = []
    if state.current != newest or state.updating_to is not None:
        problems.append(f"version {state.current} is current, and {newest} was acknowledged last")
    held = {(replica.version, replica.checksum) for replica in state.replicas}
    if len(held) != 1 or (newest, None) in held or {version for version, _ in held} != {newest}:
        problems.append(f"the replicas hold {sorted(map(str, held))}, and {newest} was acknowledged last")
    return problems


async def logprob_problems(client: AsyncRolloutClient, known: KnownWeights, version: int, state: State) -> list[str]:
    """Plays greedy rollouts by `version`, whose weights are `state`, and compares them with transformers."""
    samples = await client.example_samples(TASK_NAME, ROLLOUTS, seed=version)
    options: Any = {"sampling": SAMPLING, "max_rollout_turns": TURNS, "sample_retries": 0}
    played = (await client.rollout(samples, **options, policy={"version": version})).samples
    if failed := [result.error for result in played if result.error is not None]:
        return [f"version {version} was demanded, and rollouts failed: {failed[0]}"]
    difference = differences(played, {str(version): known.loaded(state)})[str(version)].abs().mean().item()
    if difference <= TOLERANCE:
        return []
    return [f"version {version}: log-probabilities differ from those of transformers by {difference:.4f} on average"]
