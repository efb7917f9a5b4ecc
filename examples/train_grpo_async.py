"""The training of `train_grpo.py` one step off-policy: the next rollouts are played while the trainer trains.

Learn from it the asynchronous loop. The rollouts of step n + 1 begin with the weights that step n - 1 has left, before
the trainer trains on those of step n. The push after step n changes the weights in their middle, and they go on. So a
rollout ends at most one version behind: `max_staleness: 1` cuts it off where that is not so, and the trainer leaves it
out.
"""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from examples.additions import (
    CONFIG,
    SAMPLING,
    ConfigArgument,
    Curve,
    CurveOption,
    SeedOption,
    UrlOption,
    held_out_accuracy,
    mean_reward,
    progress_bar,
    running_service,
    training_sums,
)
from examples.train_grpo import (
    NUM_GENERATIONS,
    STEPS,
    STEPS_BETWEEN_MEASUREMENTS,
    improve,
    model_to_train,
    prompt_batches,
)
from models.tiny.train import PAD
from rollout_client import PolicyPusher, RolloutClient, RolloutResponse
from rollout_client.tensors import to_tensors

MAX_STALENESS = 1


def main(
    config: ConfigArgument = CONFIG,
    url: UrlOption = None,
    steps: Annotated[int, typer.Option(min=1)] = STEPS,
    seed: SeedOption = 0,
    curve: CurveOption = Path("train_async.png"),
) -> None:
    """Trains the embedded model on additions, one step off-policy, and measures it on sums that it never sees."""
    console = Console(stderr=True)
    with running_service(config, url, console) as client:
        trained = train(client, steps, seed, console)
    trained.report(curve, console)


def train(client: RolloutClient, steps: int, seed: int, console: Console) -> Curve:
    model, optimizer, schedule = model_to_train(steps, seed)
    # A service that was running already may have the weights of an earlier training.
    pusher = PolicyPusher(client)
    version = pusher.push(model).version
    curve = Curve("GRPO on additions, one step off-policy", held_out={0: held_out_accuracy(client, version)})
    with progress_bar(console) as progress, ThreadPoolExecutor(1) as thread:
        task = progress.add_task("", total=steps, latest=curve.latest)
        begin = rollouts_of_next_step(client, thread, seed)
        ahead = begin(version)
        for step in range(1, steps + 1):
            response = ahead.result()
            if step < steps:
                ahead = begin(version)
            curve.reward[step] = mean_reward(response)
            improve(model, optimizer, to_tensors(response, pad_token_id=PAD))
            schedule.step()
            version = pusher.push(model).version
            if step % STEPS_BETWEEN_MEASUREMENTS == 0 or step == steps:
                curve.held_out[step] = held_out_accuracy(client, version)
                progress.console.print(f"After {step} steps: held-out {curve.held_out[step]:.1%}")
            progress.update(task, advance=1, latest=curve.latest)
    return curve


def rollouts_of_next_step(
    client: RolloutClient, thread: ThreadPoolExecutor, seed: int
) -> Callable[[int], "Future[RolloutResponse]"]:
    """Starts the rollouts of one step after another; each call takes the newest version of the weights."""
    prompts = prompt_batches(training_sums(client, seed), seed)

    def begin(version: int) -> "Future[RolloutResponse]":
        return thread.submit(
            client.rollout,
            next(prompts),
            num_generations=NUM_GENERATIONS,
            sampling=SAMPLING,
            policy={"min_version": version, "max_staleness": MAX_STALENESS},
        )

    return begin


if __name__ == "__main__":
    typer.run(main)
