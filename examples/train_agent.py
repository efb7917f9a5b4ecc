"""Trains an environment of verifiers, then an agent with a tool, by GRPO through sessions: `make train-agent`.

Learn from it how to train what brings its own loop. Each rollout is a program that gets the address and the key of a
session; trained are the tokens that the session has recorded, as they were sampled. The algorithm is that of
`train_grpo.py`. Both parts begin with the embedded model with thoughts and tools, and are measured on tasks that are
not among those that they are trained on.
"""

import asyncio
import json
import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer
from ray.serve.schema import ServeDeploySchema
from rich.console import Console

from examples import tool_agent
from examples.stand_ins import wait_until_it_answers
from examples.task_configs import BRIDGED, CONFIG, ConfigArgument, config_for, python_of
from examples.train_grpo import (
    EMBEDDED,
    Curve,
    SeedOption,
    UrlOption,
    improve,
    model_to_train,
    progress_bar,
    service_or_url,
)
from rollout_client import AsyncPolicyPusher, AsyncRolloutClient, SampleInput, Sampling, play_agent
from rollout_client.agent_runner import Agent, AgentReward, AgentRollout
from rollout_client.tensors import to_tensors
from service.startup.config import free_port

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = REPOSITORY / "models" / "small"
VERIFIERS_HARNESS = "deployments.tasks.bridges.verifiers_harness"
TASKSET = "facts_taskset"
HELD_OUT_TASKS = 200
"""Those of the taskset with the lowest indexes, and as many questions of the agent. Each is played once; the standard
error of the accuracy is two to four percentage points."""
TRAINING_TASKS = 4000
SAMPLING = Sampling(temperature=1.0, max_new_tokens=96)
STEPS = 10
PROMPTS_PER_STEP = 16
NUM_GENERATIONS = 8
MINIBATCHES = 2
LEARNING_RATE = 3e-4
CONCURRENCY = 64
TIMEOUT_S = 120.0
"""Time limit of one run of an agent."""
CALL_TIMEOUT_S = 600.0
"""Time limit of opening and reading sessions, and of pushes: the service and the trainer share the cores."""
NEEDED_GAIN = 0.2


@dataclass(frozen=True)
class Part:
    """A program to train, with its tasks."""

    title: str
    agent: Agent
    training: Sequence[SampleInput]
    held_out: Sequence[SampleInput]


def main(
    config: ConfigArgument = CONFIG,
    url: UrlOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Of each of the two parts.")] = STEPS,
    seed: SeedOption = 0,
) -> None:
    """Trains both; ends with exit code 1 if one of them gains less than 20 percentage points on held-out tasks."""
    console = Console(stderr=True)
    with service_or_url(lambda: service_config(config), url, console) as address, verifiers_harness() as harness:
        curves = asyncio.run(train_parts(address, harness, steps, seed, console))
    typer.echo(json.dumps({name: summary(curve) for name, curve in curves.items()}))
    raise typer.Exit(code=int(any(gain(curve) < NEEDED_GAIN for curve in curves.values())))


def service_config(path: Path) -> ServeDeploySchema:
    """The config with the embedded model with tools, its parsers, and sessions."""
    config = config_for(path, MODEL, ["math"])
    [application] = config.applications
    application.args["sessions"] = {}
    return config


@contextmanager
def verifiers_harness(taskset: str = TASKSET) -> Iterator[str]:
    """Runs verifiers in a Python environment of its own; yields the URL at which it plays the taskset."""
    port = free_port()
    folders = [BRIDGED / "verifiers_tasksets", REPOSITORY, REPOSITORY / "clients"]
    command = [str(python_of("verifiers")), "-m", VERIFIERS_HARNESS, json.dumps({"id": taskset})]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    with subprocess.Popen(
        [*command, "--port", str(port), "--until-input-ends"], stdin=subprocess.PIPE, env=variables
    ) as process:
        assert process.stdin is not None
        url = f"http://127.0.0.1:{port}/"
        try:
            wait_until_it_answers(url)
            yield url
        finally:
            process.stdin.close()


async def train_parts(url: str, harness: str, steps: int, seed: int, console: Console) -> dict[str, Curve]:
    async with (
        AsyncRolloutClient(url, timeout_s=CALL_TIMEOUT_S) as client,
        httpx.AsyncClient(timeout=None, trust_env=False) as connection,
    ):
        await client.wait_until_ready()
        parts = {"verifiers": verifiers_part(connection, harness), "tool_agent": tool_part(seed)}
        return {name: await train(client, part, steps, seed, console) for name, part in parts.items()}


def verifiers_part(connection: httpx.AsyncClient, harness: str) -> Part:
    """A taskset of verifiers, which is played in its own process by its own client."""

    async def agent(base_url: str, api_key: str, sample: SampleInput) -> AgentReward:
        run = {"base_url": base_url, "api_key": api_key, "sample": sample.model_dump(exclude_unset=True)}
        answer = await connection.post(harness, json=run)
        if answer.is_error:
            raise RuntimeError(f"verifiers answered {answer.status_code}: {answer.text}")
        rewards: dict[str, float] = answer.json()
        return rewards

    tasks = [
        SampleInput.model_validate({"task_name": TASKSET, "extra_env_info": {"index": index}})
        for index in range(HELD_OUT_TASKS + TRAINING_TASKS)
    ]
    return Part("A verifiers environment", agent, tasks[HELD_OUT_TASKS:], tasks[:HELD_OUT_TASKS])


def tool_part(seed: int) -> Part:
    held_out = random.Random(seed).sample(tool_agent.questions(held_out=True), HELD_OUT_TASKS)
    return Part("An agent with a tool", tool_agent.agent, tool_agent.questions(held_out=False), held_out)


async def train(client: AsyncRolloutClient, part: Part, steps: int, seed: int, console: Console) -> Curve:
    """The loop of `train_grpo.py`, whose rollouts are runs of the part's agent."""
    model, optimizer, schedule = model_to_train(
        str(MODEL), EMBEDDED._replace(steps=steps, learning_rate=LEARNING_RATE), seed
    )
    pusher = AsyncPolicyPusher(client)
    version = (await pusher.push(model)).version
    draw = random.Random(seed)
    before = await played(client, part, part.held_out, 1, version)
    curve = Curve(part.title, held_out={0: mean_reward(before)})
    console.print(f"{part.title}, before training: held-out {curve.held_out[0]:.1%}")
    with progress_bar(console) as progress:
        task = progress.add_task("", total=steps, latest=curve.latest)
        for step in range(1, steps + 1):
            tasks = draw.sample(part.training, PROMPTS_PER_STEP)
            rollouts = await played(client, part, tasks, NUM_GENERATIONS, version)
            curve.reward[step] = mean_reward(rollouts)
            # The last branch is the conversation that was rewarded. One before it is a call that was made again.
            samples = [rollout.samples[-1] for rollout in rollouts if rollout.error is None]
            curve.difference[step] = improve(model, optimizer, to_tensors(samples, pad_token_id=0), MINIBATCHES)
            schedule.step()
            version = (await pusher.push(model)).version
            progress.update(task, advance=1, latest=curve.latest)
    after = await played(client, part, part.held_out, 1, version)
    curve.held_out[steps] = mean_reward(after)
    console.print(f"{part.title}, after {steps} steps: held-out {curve.held_out[steps]:.1%}")
    return curve


async def played(
    client: AsyncRolloutClient, part: Part, tasks: Sequence[SampleInput], num_generations: int, version: int
) -> list[AgentRollout]:
    """Runs of the agent, whose sessions are answered by the weights of `version` alone."""
    groups = await play_agent(
        client,
        part.agent,
        tasks,
        num_generations=num_generations,
        concurrency=CONCURRENCY,
        timeout_s=TIMEOUT_S,
        sampling=SAMPLING,
        policy={"version": version},
    )
    return [rollout for group in groups for rollout in group]


def mean_reward(rollouts: Sequence[AgentRollout]) -> float:
    """Mean of the runs that did not fail; a failed one has no reward. If all failed, raises the first failure."""
    rewards = [rollout.total_reward for rollout in rollouts if rollout.total_reward is not None]
    if not rewards:
        raise next(rollout.error for rollout in rollouts if rollout.error is not None)
    return sum(rewards) / len(rewards)


def summary(curve: Curve) -> dict[str, float]:
    before, *_, after = curve.held_out.values()
    return {
        "held_out_before": round(before, 4),
        "held_out_after": round(after, 4),
        "gain_points": round(100 * gain(curve), 1),
    }


def gain(curve: Curve) -> float:
    """Gain of the share right on held-out tasks, from -1 to 1."""
    before, *_, after = curve.held_out.values()
    return after - before


if __name__ == "__main__":
    typer.run(main)
