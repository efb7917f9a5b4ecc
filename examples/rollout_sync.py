"""Play both tasks in one request and look at what came back. Needs the service at http://127.0.0.1:8000."""

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
