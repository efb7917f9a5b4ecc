"""Streams the rollouts of two tasks with the async client. Needs the service at http://127.0.0.1:8000 (`make serve`).

Learn from it how to take each rollout as it ends, and the summary at the end of the stream.
"""

import asyncio

from rich.console import Console

from rollout_client import AsyncRolloutClient, Sampling
from rollout_client.cli.transcript import metrics_table, transcript

console = Console()


async def main() -> None:
    async with AsyncRolloutClient("http://127.0.0.1:8000") as client:
        await client.wait_until_ready()
        math, puzzles = await asyncio.gather(
            client.example_samples("math", count=2), client.example_samples("sliding_puzzle", count=2)
        )
        sampling = Sampling(max_new_tokens=64, seed=1)
        async with client.stream(math + puzzles, sampling=sampling, max_rollout_turns=4) as rollouts:
            async for sample in rollouts:
                console.print(transcript(sample))
        console.print(metrics_table(rollouts.summary.metrics))


asyncio.run(main())
