"""Trains the embedded model with GRPO: rollouts from the service, gradients here, new weights back after each step.

Learn from it a whole training loop that needs only the client; with another task and another model it stays the same.

The algorithm: advantages within the group of one prompt's rollouts, PPO's clipped objective against the
log-probabilities of the service, the mean over generated tokens, no reference model. The trainer's weights are float32,
so that updates too small for bfloat16 add up; the service gets them rounded.
"""

# mypy: disable-error-code="no-untyped-call"

import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM

from examples.additions import (
    CONFIG,
    MODEL,
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
from models.tiny.train import PAD
from rollout_client import PolicyPusher, RolloutClient, SampleInput
from rollout_client.tensors import RolloutTensors, to_tensors

STEPS = 60
PROMPTS_PER_STEP = 256
NUM_GENERATIONS = 4
MINIBATCHES = 4
EPOCHS = 2
LEARNING_RATE = 1.5e-4
WARMUP_STEPS = 5
CLIP = 0.2
GRADIENT_NORM = 0.5
STEPS_BETWEEN_MEASUREMENTS = 15
CausalModel = LlamaForCausalLM | Qwen3ForCausalLM
"""One of the embedded models."""


def main(
    config: ConfigArgument = CONFIG,
    url: UrlOption = None,
    steps: Annotated[int, typer.Option(min=1)] = STEPS,
    seed: SeedOption = 0,
    curve: CurveOption = Path("train.png"),
) -> None:
    """Trains the embedded model on additions and measures it on sums that it never sees."""
    console = Console(stderr=True)
    with running_service(config, url, console) as client:
        trained = train(client, steps, seed, console)
    trained.report(curve, console)


def train(client: RolloutClient, steps: int, seed: int, console: Console) -> Curve:
    model, optimizer, schedule = model_to_train(steps, seed)
    prompts = prompt_batches(training_sums(client, seed), seed)
    # A service that was running already may have the weights of an earlier training.
    pusher = PolicyPusher(client)
    version = pusher.push(model).version
    curve = Curve("GRPO on additions", held_out={0: held_out_accuracy(client, version)})
    with progress_bar(console) as progress:
        task = progress.add_task("", total=steps, latest=curve.latest)
        for step in range(1, steps + 1):
            response = client.rollout(
                next(prompts), num_generations=NUM_GENERATIONS, sampling=SAMPLING, policy={"min_version": version}
            )
            curve.reward[step] = mean_reward(response)
            improve(model, optimizer, to_tensors(response, pad_token_id=PAD))
            schedule.step()
            # What changed, where that is smaller than all weights.
            version = pusher.push(model).version
            if step % STEPS_BETWEEN_MEASUREMENTS == 0 or step == steps:
                curve.held_out[step] = held_out_accuracy(client, version)
                progress.console.print(f"After {step} steps: held-out {curve.held_out[step]:.1%}")
            progress.update(task, advance=1, latest=curve.latest)
    return curve


def model_to_train(
    steps: int, seed: int, folder: Path = MODEL, learning_rate: float = LEARNING_RATE
) -> tuple[CausalModel, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """An embedded model in float32, its optimizer, and the learning rates of `steps` steps."""
    torch.manual_seed(seed)
    # The service computes on the same cores; with a second thread the two would mostly wait for each other.
    torch.set_num_threads(1)
    untyped: Any = AutoModelForCausalLM
    model: CausalModel = untyped.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    return model, optimizer, schedule


def prompt_batches(sums: list[SampleInput], seed: int) -> Iterator[list[SampleInput]]:
    """Yields the prompts of one step after another without end; those of a step are all different."""
    draw = random.Random(seed)
    while True:
        yield draw.sample(sums, PROMPTS_PER_STEP)


def improve(
    model: CausalModel, optimizer: torch.optim.Optimizer, batch: RolloutTensors, minibatches: int = MINIBATCHES
) -> None:
    """Trains `EPOCHS` times on the rollouts. Those with an advantage of zero have no gradient and are left out.

    Where all groups agree, which happens near the end of a training, nothing is left, and the model stays as it is.
    """
    with_gradient = batch.advantages.nonzero()[:, 0]
    if not len(with_gradient):
        return
    # Nothing after the last generated token is in the loss.
    length = int(batch.loss_mask.any(0).nonzero().max()) + 1
    tokens = batch.loss_mask.sum() / minibatches
    shuffled = [with_gradient[torch.randperm(len(with_gradient))].chunk(minibatches) for _ in range(EPOCHS)]
    for rows in chain.from_iterable(shuffled):
        loss = policy_loss(model, batch, rows, length) / tokens
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()


def policy_loss(model: CausalModel, batch: RolloutTensors, rows: torch.Tensor, length: int) -> torch.Tensor:
    """PPO's clipped objective, negated and summed over the generated tokens of `rows`."""
    input_ids = batch.input_ids[rows, :length]
    # Padding is on the right, which causal attention does not see: no attention mask is needed.
    hidden = model.model(input_ids=input_ids).last_hidden_state[:, :-1]
    # Logits are computed for generated tokens only.
    generated = batch.loss_mask[rows, 1:length].bool()
    logprobs = model.lm_head(hidden[generated]).log_softmax(-1)
    logprobs = logprobs.gather(1, input_ids[:, 1:][generated, None])[:, 0]
    ratio = (logprobs - batch.generation_logprobs[rows, 1:length][generated]).exp()
    advantages = batch.advantages[rows, None].expand_as(generated)[generated]
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).sum()


def learning_rate_factor(step: int, steps: int) -> float:
    """Rises over `WARMUP_STEPS` and falls linearly to a tenth, so that the last steps add little noise."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * (1 - 0.9 * step / steps)


if __name__ == "__main__":
    typer.run(main)
