"""Trains agents by GRPO through sessions: `python -m examples.train_agent`, or with `--only tools` one of them.

Learn from it how to train what brings its own loop. Each rollout is a program that gets the address and the key of a
session; trained are the tokens that the session has recorded, as they were sampled. The algorithm is that of
`train_grpo.py`. Both agents begin with the embedded model with thoughts and tools, and are measured on tasks that are
not among those that they are trained on. The one of verifiers needs `python -m requirements.beside verifiers`.
"""

import argparse
import asyncio
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
from ray.serve.schema import ServeDeploySchema

from examples import tool_agent
from examples.stand_ins import wait_until_it_answers
from examples.task_configs import BRIDGED, CONFIG, config_for, python_of
from examples.train import running_service
from examples.train_grpo import Figures, improve, mean_distance, model_to_train, parser, summary
from rollout_client import AsyncPolicyPusher, AsyncRolloutClient, SampleInput, Sampling, play_agent
from rollout_client.agent_runner import Agent, AgentReward, AgentRollout
from rollout_client.tensors import to_tensors
from service.startup.config import free_port

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = REPOSITORY / "models" / "small"
RECIPE = f"{MODEL} --questions=- --steps=10 --learning-rate=3e-4 --lora-rank=0 --max-new-tokens=96".split()
"""Options of `train_grpo.py`."""
VERIFIERS_HARNESS = "deployments.tasks.bridges.verifiers_harness"
TASKSET = "facts_taskset"
HELD_OUT_TASKS = 200
"""Those of the taskset with the lowest indexes, and as many questions of the agent. Each is played once; the standard
error of the accuracy is two to four percentage points."""
TRAINING_TASKS = 4000
CONCURRENCY = 64
TIMEOUT_S = 120.0
"""Time limit of one run of an agent."""
CALL_TIMEOUT_S = 600.0
"""Time limit of opening and reading sessions, and of pushes: the service and the trainer share the cores."""
logger = logging.getLogger(__name__)


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


async def train_verifiers(url: str, options: argparse.Namespace) -> list[Figures]:
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
    with verifiers_harness() as harness:
        async with httpx.AsyncClient(timeout=None, trust_env=False) as connection:
            return await train(url, agent, tasks[HELD_OUT_TASKS:], tasks[:HELD_OUT_TASKS], options)


async def train_tools(url: str, options: argparse.Namespace) -> list[Figures]:
    """An agent that may call a tool."""
    held_out = random.Random(options.seed).sample(tool_agent.questions(held_out=True), HELD_OUT_TASKS)
    return await train(url, tool_agent.agent, tool_agent.questions(held_out=False), held_out, options)


AGENTS = {"verifiers": train_verifiers, "tools": train_tools}


async def train(
    url: str,
    agent: Agent,
    training: Sequence[SampleInput],
    held_out: Sequence[SampleInput],
    options: argparse.Namespace,
) -> list[Figures]:
    """The loop of `train_grpo.py`, whose rollouts are runs of the agent."""
    model, optimizer, schedule = model_to_train(options)
    draw = random.Random(options.seed)
    async with AsyncRolloutClient(url, timeout_s=CALL_TIMEOUT_S) as client:
        await client.wait_until_ready()
        played = partial(runs, client, agent, options)
        pusher = AsyncPolicyPusher(client)
        version = (await pusher.push(model)).version
        history: list[Figures] = [{"held_out": mean_reward(await played(held_out, 1, version))}]
        for step in range(1, options.steps + 1):
            tasks = draw.sample(training, options.prompts_per_step)
            rollouts = await played(tasks, options.num_generations, version)
            # The last branch is the conversation that was rewarded. One before it is a call that was made again.
            samples = [rollout.samples[-1] for rollout in rollouts if rollout.error is None]
            batch = to_tensors(samples, pad_token_id=0)
            difference = mean_distance(batch, *improve(model, optimizer, batch, options.minibatches))
            schedule.step()
            version = (await pusher.push(model)).version
            history.append({"reward": mean_reward(rollouts), "difference": difference})
            logger.info("Step %s of %s: %s", step, options.steps, json.dumps(history[-1]))
        history[-1]["held_out"] = mean_reward(await played(held_out, 1, version))
    return history


async def runs(
    client: AsyncRolloutClient,
    agent: Agent,
    options: argparse.Namespace,
    tasks: Sequence[SampleInput],
    num_generations: int,
    version: int,
) -> list[AgentRollout]:
    """Runs of the agent, whose sessions are answered by the weights of `version` alone."""
    groups = await play_agent(
        client,
        agent,
        tasks,
        num_generations=num_generations,
        concurrency=CONCURRENCY,
        timeout_s=TIMEOUT_S,
        sampling=Sampling(temperature=1.0, max_new_tokens=options.max_new_tokens),
        policy={"version": version},
    )
    return [rollout for group in groups for rollout in group]


def mean_reward(rollouts: Sequence[AgentRollout]) -> float:
    """Mean of the runs that did not fail; a failed one has no reward. If all failed, raises the first failure."""
    rewards = [rollout.total_reward for rollout in rollouts if rollout.total_reward is not None]
    if not rewards:
        raise next(rollout.error for rollout in rollouts if rollout.error is not None)
    return sum(rewards) / len(rewards)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", choices=AGENTS, help="One of the two agents.")
    only = arguments.parse_args().only
    options = parser().parse_args(RECIPE)
    with running_service(service_config(CONFIG)) as url:
        figures = {name: summary(asyncio.run(AGENTS[name](url, options))) for name in ([only] if only else AGENTS)}
    sys.stdout.write(f"{json.dumps(figures)}\n")


if __name__ == "__main__":
    main()
