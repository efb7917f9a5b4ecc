"""The training of `train_grpo.py` one step off-policy: the next rollouts are played while the trainer trains.

Learn from it the asynchronous loop. The rollouts of step n + 1 begin with the weights that step n - 1 has left, before
the trainer trains on those of step n. The push after step n changes the weights in their middle, and they go on. So a
rollout ends at most one version behind: `max_staleness: 1` cuts it off where that is not so, and the trainer leaves it
out.
"""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from examples.task_configs import CONFIG, ConfigArgument
from examples.train_grpo import (
    EMBEDDED,
    SAMPLING,
    Curve,
    CurveOption,
    ReportOption,
    SeedOption,
    UrlOption,
    additions,
    held_out_accuracy,
    improve,
    mean_reward,
    model_to_train,
    progress_bar,
    prompt_batches,
    report_step,
    running_service,
    wants_reports,
)
from rollout_client import PolicyPusher, RolloutClient, RolloutResponse, SampleInput
from rollout_client.tensors import to_tensors
from service.startup.config import free_port, read_config
from service.startup.generated_config import EMBEDDED_MODEL

MAX_STALENESS = 1


def main(
    config: ConfigArgument = CONFIG,
    url: UrlOption = None,
    steps: Annotated[int, typer.Option(min=1)] = EMBEDDED.steps,
    seed: SeedOption = 0,
    curve: CurveOption = Path("train_async.png"),
    report_logprobs: ReportOption = None,
) -> None:
    """Trains the embedded model on additions, one step off-policy, and measures it on sums that it never sees."""
    console = Console(stderr=True)
    with running_service(lambda: read_config(config, port=free_port()), url, console) as client:
        trained = train(client, steps, seed, console, report_logprobs)
    trained.report(curve, console)


def train(client: RolloutClient, steps: int, seed: int, console: Console, report_logprobs: bool | None = None) -> Curve:
    model, optimizer, schedule = model_to_train(str(EMBEDDED_MODEL), EMBEDDED._replace(steps=steps), seed)
    questions = additions()
    # A service that was running already may have the weights of an earlier training.
    pusher = PolicyPusher(client)
    version = pusher.push(model).version
    curve = Curve("GRPO on additions, one step off-policy", held_out={0: held_out_accuracy(client, questions, version)})
    reports = wants_reports(client, report_logprobs)
    with progress_bar(console) as progress, ThreadPoolExecutor(1) as thread:
        task = progress.add_task("", total=steps, latest=curve.latest)
        begin = rollouts_of_next_step(client, thread, questions.trained_on, seed)
        ahead = begin(version)
        for step in range(1, steps + 1):
            response = ahead.result()
            if step < steps:
                ahead = begin(version)
            curve.reward[step] = mean_reward(response)
            # Tokens of the version before are no finding: the report says with which one it was computed.
            report = partial(report_step, client, version, step, curve, progress.console) if reports else None
            batch = to_tensors(response, pad_token_id=0)
            curve.difference[step] = improve(model, optimizer, batch, EMBEDDED.minibatches, report=report)
            schedule.step()
            version = pusher.push(model).version
            if step % EMBEDDED.steps_between_measurements == 0 or step == steps:
                curve.held_out[step] = held_out_accuracy(client, questions, version)
                progress.console.print(f"After {step} steps: held-out {curve.held_out[step]:.1%}")
            progress.update(task, advance=1, latest=curve.latest)
    return curve


def rollouts_of_next_step(
    client: RolloutClient, thread: ThreadPoolExecutor, sums: list[SampleInput], seed: int
) -> Callable[[int], "Future[RolloutResponse]"]:
    """Starts the rollouts of one step after another; each call takes the newest version of the weights."""
    prompts = prompt_batches(sums, EMBEDDED.prompts_per_step, seed)

    def begin(version: int) -> "Future[RolloutResponse]":
        return thread.submit(
            client.rollout,
            next(prompts),
            num_generations=EMBEDDED.num_generations,
            sampling=SAMPLING,
            policy={"min_version": version, "max_staleness": MAX_STALENESS},
        )

    return begin


if __name__ == "__main__":
    typer.run(main)
