"""Measures how long engine and environment go on with what nobody waits for any more: `make bench-cancellation`.

The service runs on a simulated engine. 256 rollouts are under way, half of them in a generation and half in a step of
an environment that holds a session for each, when their client hangs up, leaves its stream, reaches its deadline, or
deletes the job. What counts is the time until the engine has no generation, and the environment no step and no session.

The last line is JSON: by way, the longest of all rounds, in seconds. The exit code is 1 if one took too long.
"""

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema, ServeDeploySchema
from rich.console import Console

from benchmarks.cancellation.endless_environment import TASK_NAME
from benchmarks.cancellation.ways import WAYS, seconds_until_given_up
from benchmarks.process_group import no_process_left
from benchmarks.soak.reporting import finish
from service.local import local_service, sentences_for_the_user
from service.startup.config import read_config
from service.startup.ports import free_port

GIVEN_UP_WITHIN_S = 10.0
GOAL_S = 1.0
console = Console(stderr=True)


def config_of_one_replica(path: Path) -> ServeDeploySchema:
    """The config of a simulated engine with one generator, the environment that never ends, and jobs."""
    config = read_config(path, port=free_port())
    [application] = config.applications
    application.args["environments"] = {
        TASK_NAME: {"import_path": "benchmarks.cancellation.endless_environment:EndlessEnvironment"}
    }
    application.args["jobs"] = {}
    application.deployments = [
        *(deployment for deployment in application.deployments if deployment.name == "Ingress"),
        DeploymentSchema(name="Generator", num_replicas=1),
        DeploymentSchema(name=TASK_NAME, num_replicas=1, ray_actor_options=RayActorOptionsSchema(num_cpus=0.1)),
    ]
    return config


async def longest_of_rounds(url: str, rounds: int) -> dict[str, float]:
    seconds = defaultdict[str, float](float)
    for _ in range(rounds):
        for name, way in WAYS.items():
            taken = await seconds_until_given_up(url, way, GIVEN_UP_WITHIN_S)
            console.print(f"{name}: {taken:.2f} s")
            seconds[name] = max(seconds[name], taken)
    return seconds


def main(
    config: Annotated[Path, typer.Argument(help="Of a simulated engine.")] = Path("serve_config.scale.yaml"),
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    with (
        sentences_for_the_user(console),
        no_process_left(),
        local_service(config_of_one_replica(config), console) as url,
    ):
        seconds = asyncio.run(longest_of_rounds(url, rounds))
    late = [f"{name}: {taken:.2f} s, more than {GOAL_S:g} s" for name, taken in seconds.items() if taken > GOAL_S]
    finish(console, late, {f"{name}_s": round(taken, 2) for name, taken in seconds.items()})


if __name__ == "__main__":
    typer.run(main)
