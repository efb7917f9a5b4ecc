"""Whether rollouts repeat: unseeded ones never, seeded ones always. `make check-streams`.

Two fresh replicas of the engine play many unseeded rollouts of one prompt. By their own log-probabilities it is next to
impossible that two of them have equal tokens; where replicas share a random stream, some or all do. Then rollouts of a
seeded request are played on two replicas and on one, and must be equal. Ends with exit code 1 if a check fails; the
last line is JSON.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Annotated, Any

import typer
from ray.serve.schema import ServeDeploySchema
from rich.console import Console

from benchmarks.process_group import no_process_left
from rollout_client import RolloutClient, SampleResult
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service, sentences_for_the_user
from service.startup.readiness import deploy, deployments_not_ready

GENERATIONS = 1024
"""Of one sample: the most that the contract allows."""
MOST_EXPECTED_COINCIDENCES = 1e-6
SEEDED = 64
SEEDED_TOKENS = 16
"""Few: in a batch of another size the engine rounds differently, and over many tokens that changes one."""
CORES_OF_A_REPLICA = 0.4
console = Console(stderr=True)


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.cpu.yaml"),
    samples: Annotated[int, typer.Option(min=1, help=f"Of {GENERATIONS} rollouts each, all of one prompt.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Of each rollout.")] = 64,
) -> None:
    with sentences_for_the_user(console), no_process_left():
        settings = with_generators(read_config(config, port=free_port()), 2)
        with local_service(settings, console) as url, RolloutClient(url) as client:
            began = perf_counter()
            unseeded = play(client, samples, GENERATIONS, {"max_new_tokens": tokens})
            seconds = perf_counter() - began
            on_two = play(client, 1, SEEDED, {"max_new_tokens": SEEDED_TOKENS, "seed": 1})
            deploy(with_generators(settings, 1))
            for _ in deployments_not_ready(settings):
                pass
            on_one = play(client, 1, SEEDED, {"max_new_tokens": SEEDED_TOKENS, "seed": 1})
    figures = {
        "rollouts": len(unseeded),
        "seconds": round(seconds, 1),
        "expected_coincidences": expected_coincidences(unseeded),
        "copies": copies(unseeded),
        "seeded_that_differ": sum(one != two for one, two in zip(tokens_of(on_one), tokens_of(on_two), strict=True)),
    }
    typer.echo(json.dumps(figures))
    is_right = figures["expected_coincidences"] < MOST_EXPECTED_COINCIDENCES and not figures["copies"]
    raise typer.Exit(0 if is_right and not figures["seeded_that_differ"] else 1)


def with_generators(settings: ServeDeploySchema, count: int) -> ServeDeploySchema:
    [application] = settings.applications
    application.args["engine"]["num_cpus"] = CORES_OF_A_REPLICA
    for deployment in application.deployments:
        if deployment.name == "Generator":
            deployment.num_replicas = count
    return settings


def play(client: RolloutClient, samples: int, generations: int, sampling: dict[str, Any]) -> list[SampleResult]:
    prompt = client.example_samples("math", 1, seed=0) * samples
    sampling |= {"temperature": 2.0, "ignore_eos": True}
    return client.rollout(prompt, num_generations=generations, sampling=sampling, max_rollout_turns=1).samples


def tokens_of(results: Sequence[SampleResult]) -> list[tuple[int, ...]]:
    """Of the generation of each."""
    return [tuple(result.message_log[1].token_ids) for result in results]


def copies(results: Sequence[SampleResult]) -> int:
    """Rollouts that have the tokens of another one."""
    return sum(count for count in Counter(tokens_of(results)).values() if count > 1)


def expected_coincidences(results: Sequence[SampleResult]) -> float:
    """The expected number of pairs with equal tokens among independent rollouts.

    Two rollouts are equal with the probability sum(p(x)^2) over all x, which is the mean of p(x) over rollouts x.
    """
    pairs = len(results) * (len(results) - 1) / 2
    return pairs * fmean(math.exp(sum(result.message_log[1].generation_logprobs or ())) for result in results)


if __name__ == "__main__":
    typer.run(main)
