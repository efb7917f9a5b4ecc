"""Measures how long engine and environment go on with what nobody waits for any more: `make bench-cancellation`.

First the service runs on a simulated engine. 256 rollouts are under way, half of them in a generation and half in a
step of an environment that holds a session for each, when their client hangs up, leaves its stream, reaches its
deadline, deletes the job, or deletes the run of an `Idempotency-Key`. What counts is the time until the engine has no
generation, and the environment no step and no session.

Then it runs on the embedded model. 32 calls of OpenAI's API are under way when their client hangs up, leaves its
streams, or deletes the session that they are of.

The last line is JSON: by way, the longest of all rounds, in seconds. The exit code is 1 if one took too long.
"""

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema, ServeDeploySchema
from rich.console import Console

from benchmarks.cancellation.calls import CALL_WORK
from benchmarks.cancellation.endless_environment import TASK_NAME
from benchmarks.cancellation.measuring import Work
from benchmarks.cancellation.ways import ROLLOUT_WORK
from benchmarks.process_group import no_process_left
from benchmarks.reporting import finish
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service, sentences_for_the_user

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


def config_of_calls(path: Path) -> ServeDeploySchema:
    """The config of an engine with a model, with sessions."""
    config = read_config(path, port=free_port())
    config.applications[0].args["sessions"] = {}
    return config


def longest_of_rounds(config: ServeDeploySchema, work: Work, rounds: int) -> dict[str, float]:
    """In seconds, by way."""
    with local_service(config, console) as url:
        return asyncio.run(longest_at(url, work, rounds))


async def longest_at(url: str, work: Work, rounds: int) -> dict[str, float]:
    seconds = defaultdict[str, float](float)
    for _ in range(rounds):
        for name, way in work.ways.items():
            taken = await work.seconds_until_given_up(url, way, GIVEN_UP_WITHIN_S)
            console.print(f"{name}: {taken:.2f} s")
            seconds[name] = max(seconds[name], taken)
    return seconds


def main(
    config: Annotated[Path, typer.Argument(help="Of a simulated engine.")] = Path("serve_config.scale.yaml"),
    calls_config: Annotated[Path, typer.Option(help="Of an engine with a model.")] = Path("serve_config.cpu.yaml"),
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    with sentences_for_the_user(console), no_process_left():
        seconds = longest_of_rounds(config_of_one_replica(config), ROLLOUT_WORK, rounds)
        seconds |= longest_of_rounds(config_of_calls(calls_config), CALL_WORK, rounds)
    late = [f"{name}: {taken:.2f} s, more than {GOAL_S:g} s" for name, taken in seconds.items() if taken > GOAL_S]
    finish(console, late, {f"{name}_s": round(taken, 2) for name, taken in seconds.items()})


if __name__ == "__main__":
    typer.run(main)
