"""Streams, stops early, ends at a deadline and resumes. Needs the service at http://127.0.0.1:8000 (`make serve`).

Learn from it how to take each rollout as it ends, how to cancel the slowest rollouts of a group, and how to go on with
rollouts that a deadline cut off.
"""

from rich.console import Console

from rollout_client import Keep, RolloutClient, Sampling, resumed
from rollout_client.cli.transcript import transcript

console = Console()
sampling = Sampling(temperature=1.0, max_new_tokens=48)

with RolloutClient("http://127.0.0.1:8000") as client:
    client.wait_until_ready()
    games = client.example_samples("sliding_puzzle", count=4)

    console.rule("Each rollout as it ends; a group of four is done when two of them are")
    with client.stream(games, num_generations=4, sampling=sampling, keep=Keep(per_group=2)) as rollouts:
        for sample in rollouts:
            console.print(
                f"game {sample.idx} generation {sample.generation_index}: {sample.status}, "
                f"{sample.metrics.turn_count} turns, reward {sample.total_reward}"
            )

    console.rule("Rollouts that a deadline of half a second cuts off, and their resumption")
    cut = client.rollout(games * 8, sampling=sampling, deadline_s=0.5).samples
    unfinished = [sample for sample in cut if sample.status == "deadline"]
    console.print(f"{len(cut) - len(unfinished)} games ended in time, {len(unfinished)} are resumed")
    if unfinished:
        rest = client.rollout([resumed(sample) for sample in unfinished], sampling=sampling).samples
        longest = max(rest, key=lambda sample: len(sample.message_log))
        console.print(transcript(longest))
