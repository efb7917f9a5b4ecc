"""Plays two tasks in one request and prints the rollouts. Needs the service at http://127.0.0.1:8000 (`make serve`).

Learn from it the shortest program: a client, samples, one call, transcripts and metrics.
"""

from rich.console import Console

from rollout_client import RolloutClient
from rollout_client.cli.transcript import metrics_table, transcript

console = Console()

with RolloutClient("http://127.0.0.1:8000") as client:
    client.wait_until_ready()
    samples = client.example_samples("math", count=2) + client.example_samples("sliding_puzzle", count=2)
    response = client.rollout(
        samples, num_generations=2, sampling={"max_new_tokens": 64, "seed": 1}, max_rollout_turns=4, progress=True
    )

for sample in response.samples:
    console.print(transcript(sample))
console.print(metrics_table(response.metrics))
