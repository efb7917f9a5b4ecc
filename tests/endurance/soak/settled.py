"""The versions that all replicas hold once nothing is under way."""

import asyncio
from time import monotonic

from rollout_client import AsyncRolloutClient
from rollout_client.contract.policy import PolicyState

SETTLED_WITHIN_S = 240.0
POLL_S = 1.0


async def problems_at_the_end(client: AsyncRolloutClient, newest: int, replicas: int | None = None) -> list[str]:
    """What is not as it should be when version `newest` was acknowledged last.

    Args:
        replicas: how many there must be.
    """
    until = monotonic() + SETTLED_WITHIN_S
    while True:
        state = await client.policy.state(checksums_within_s=POLL_S)
        problems = _problems(state, newest, replicas)
        if not problems or monotonic() > until:
            return problems
        await asyncio.sleep(POLL_S)


def _problems(state: PolicyState, newest: int, replicas: int | None) -> list[str]:
    problems = []
    if state.current != newest or state.updating_to is not None:
        problems.append(f"version {state.current} is current, and {newest} was acknowledged last")
    held = {(replica.version, replica.checksum) for replica in state.replicas}
    if len(held) != 1 or (newest, None) in held or {version for version, _ in held} != {newest}:
        problems.append(f"the replicas hold {sorted(map(str, held))}, and {newest} was acknowledged last")
    if replicas is not None and len(state.replicas) != replicas:
        problems.append(f"there are {len(state.replicas)} replicas of {replicas}")
    return problems
