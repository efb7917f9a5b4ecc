"""Streams, keeps the first two of four, cuts at a deadline and goes on. Needs the service at http://127.0.0.1:8000."""

from rich.console import Console

from rollout_client import Keep, RolloutClient, Sampling, resumed
from rollout_client.cli.transcript import transcript

console = Console()
sampling = Sampling(temperature=1.0, max_new_tokens=48)

with RolloutClient("http://127.0.0.1:8000") as client:
    client.wait_until_ready()
    games = client.example_samples("sliding_puzzle", count=4)

    console.rule("Each rollout the moment it ends, the first two of four in each group")
    with client.stream(games, num_generations=4, sampling=sampling, keep=Keep(per_group=2)) as rollouts:
        for sample in rollouts:
            console.print(
                f"game {sample.idx} generation {sample.generation_index}: {sample.status}, "
                f"{sample.metrics.turn_count} turns, reward {sample.total_reward}"
            )

    console.rule("What half a second allows, and the rest from where it was cut")
    cut = client.rollout(games * 8, sampling=sampling, deadline_s=0.5).samples
    unfinished = [sample for sample in cut if sample.status == "deadline"]
    console.print(f"{len(cut) - len(unfinished)} games ended in time, {len(unfinished)} go on")
    if unfinished:
        rest = client.rollout([resumed(sample) for sample in unfinished], sampling=sampling).samples
        longest = max(rest, key=lambda sample: len(sample.message_log))
        console.print(transcript(longest))
