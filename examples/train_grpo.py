"""Trains a model by GRPO on a running service: rollouts from there, gradients here, and the new weights back.

    python train_grpo.py models/smollm2 --questions samples.jsonl --url http://127.0.0.1:8000

Copy it and change it: it needs rollout-client[torch], transformers and, for LoRA, PEFT. The service has to serve the
same model. `make train` starts one, and draws the learning curve (`examples/train.py`).

The algorithm: advantages within the group of one prompt's rollouts, PPO's clipped objective against the
log-probabilities of the service, the mean over generated tokens, no reference model. The trainer's weights are float32,
so that updates too small for bfloat16 add up; the service gets them rounded.
"""

# mypy: disable-error-code="no-untyped-call"

import argparse
import json
import logging
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout_client import PolicyPusher, RolloutClient, RolloutResponse, SampleInput, Sampling
from rollout_client.tensors import RolloutTensors, to_tensors

EPOCHS = 2
CLIP = 0.2
GRADIENT_NORM = 0.5
ROLLOUTS_PER_HELD_OUT = 2
LOGITS_BYTES = 2**25
"""Of one forward pass. With a large vocabulary the logits of a whole batch would take gigabytes, and with a large model
the activations, which grow with them: half of it halves the memory of a step, and takes little more time."""
Figures = dict[str, float]
"""What was measured in a step, by name; step 0 is before the training."""
logger = logging.getLogger(__name__)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("model", help="Folder, or name on the Hub, of the model that the service serves.")
    add("--url", default="http://127.0.0.1:8000", help="The service.")
    add("--questions", type=Path, required=True, help="JSON lines of samples: task_name, messages, ...")
    add("--held-out", type=Path, help="JSON lines to measure with; by default each tenth line of --questions.")
    add("--steps", type=int, default=8, help="Batches of rollouts; the service gets new weights after each.")
    add("--prompts-per-step", type=int, default=16, help="Samples of a batch.")
    add("--num-generations", type=int, default=8, help="Rollouts of each prompt.")
    add("--minibatches", type=int, default=2, help="Updates of an epoch; a step has two epochs.")
    add("--max-new-tokens", type=int, default=24, help="Of a reply; longer ones are cut.")
    add("--learning-rate", type=float, default=5e-4, help="At the end of the warm-up; falls to a tenth.")
    add("--lora-rank", type=int, default=8, help="0 trains all weights.")
    add("--keep-groups", type=int, default=0, help="Train on so many groups whose rewards differ; 0: on all.")
    add("--max-staleness", type=int, default=0, help="1: the next rollouts are played while a step is trained.")
    add("--measure-every", type=int, default=4, help="Steps between measurements.")
    add("--threads", type=int, default=1, help="Of torch; on one machine the service computes on the same cores.")
    add("--seed", type=int, default=0, help="Of the order of the prompts; sampling is not seeded.")
    add("--save", type=Path, help="Folder for the trained model, with LoRA merged.")
    return parser


def train(options: argparse.Namespace, client: RolloutClient) -> list[Figures]:
    """Trains as the options say; returns the figures of each step, the first of which is before the training."""
    trained_on, held_out = questions(options)
    model, optimizer, schedule = model_to_train(options)
    push = pusher(client, model)
    sampling = Sampling(temperature=1.0, max_new_tokens=options.max_new_tokens)
    draw = random.Random(options.seed)
    # Where groups are dropped, twice as many prompts are drawn at most.
    count = min(options.prompts_per_step * (2 if options.keep_groups else 1), len(trained_on))
    keep: Any = {"groups": options.keep_groups, "where": {"reward_std": {"gt": 0}}} if options.keep_groups else None
    keeps_records = client.info().keeps_records

    def play(version: int) -> RolloutResponse:
        policy = {"min_version": version} | ({"max_staleness": options.max_staleness} if options.max_staleness else {})
        prompts, generations = draw.sample(trained_on, count), options.num_generations
        return client.rollout(prompts, num_generations=generations, sampling=sampling, policy=policy, keep=keep)

    version = push()
    history = [{"held_out": accuracy(client, held_out, sampling, version)}]
    logger.info("Held out %s questions: %.1f%% right", len(held_out), 100 * history[0]["held_out"])
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(play, version)
        for step in range(1, options.steps + 1):
            response = ahead.result()
            if options.max_staleness and step < options.steps:
                ahead = thread.submit(play, version)
            figures = {"reward": mean_reward(response)}
            logger.info("Step %s of %s: training on %s rollouts", step, options.steps, len(response.samples))
            # Padding is in no loss, and causal attention does not see it: any token will do.
            batch = to_tensors(response, pad_token_id=0)
            rows, logprobs = improve(model, optimizer, batch, options.minibatches)
            figures["difference"] = mean_distance(batch, rows, logprobs)
            if keeps_records and len(rows):
                answer = client.report_logprobs(**batch.report(logprobs, rows=rows), weight_version=str(version))
                figures["ratio"] = answer.mean_ratio
                for cause in answer.causes:
                    logger.warning("%s: %s", cause.kind, cause.message)
            schedule.step()
            version = push()
            if step % options.measure_every == 0 or step == options.steps:
                figures["held_out"] = accuracy(client, held_out, sampling, version)
            logger.info("Step %s of %s: %s", step, options.steps, json.dumps(figures))
            history.append(figures)
            if not options.max_staleness and step < options.steps:
                ahead = thread.submit(play, version)
    if options.save:
        merged = model.merge_and_unload() if options.lora_rank else model
        merged.save_pretrained(options.save)
        AutoTokenizer.from_pretrained(options.model).save_pretrained(options.save)
    return history


def questions(options: argparse.Namespace) -> tuple[list[SampleInput], list[SampleInput]]:
    """The samples to train on, and those to measure with."""
    samples = samples_in(options.questions)
    if options.held_out:
        return samples, samples_in(options.held_out)
    return [sample for place, sample in enumerate(samples) if place % 10], samples[::10]


def samples_in(path: Path) -> list[SampleInput]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [SampleInput.model_validate_json(line) for line in lines if line.strip()]


def model_to_train(
    options: argparse.Namespace,
) -> tuple[Any, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """The model in float32, its optimizer, and the learning rates of all steps."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    untyped: Any = AutoModelForCausalLM
    model = untyped.from_pretrained(options.model, dtype=torch.float32)
    if options.lora_rank:
        from peft import LoraConfig, get_peft_model

        rank = options.lora_rank
        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, options.learning_rate, weight_decay=0.0)
    warmup_steps = min(5, 1 + options.steps // 6)

    def factor(step: int) -> float:
        """Rises, then falls linearly to a tenth, so that the last steps add little noise."""
        return min(1.0, (step + 1) / warmup_steps) * (1 - 0.9 * step / options.steps)

    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def pusher(client: RolloutClient, model: Any) -> Callable[[], int]:
    """Returns a function that pushes the model, with LoRA merged, and returns the version that it has become."""
    # Sends what has changed, where that is smaller than all weights.
    changes = PolicyPusher(client)

    def push() -> int:
        if not hasattr(model, "merge_adapter"):
            return changes.push(model).version
        model.merge_adapter()
        version = changes.push(model).version
        model.unmerge_adapter()
        return version

    return push


def accuracy(client: RolloutClient, held_out: list[SampleInput], sampling: Sampling, version: int) -> float:
    """The share of the questions held out that the weights of `version` get right, from 0 to 1."""
    policy = {"version": version}
    return mean_reward(
        client.rollout(held_out, num_generations=ROLLOUTS_PER_HELD_OUT, sampling=sampling, policy=policy)
    )


def mean_reward(response: RolloutResponse) -> float:
    """The mean total reward of all rollouts that have one, also of groups that were dropped."""
    mean = response.metrics["mean_total_reward"]
    assert isinstance(mean, float)
    return mean


def improve(
    model: Any, optimizer: torch.optim.Optimizer, batch: RolloutTensors, minibatches: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Trains `EPOCHS` times on the rollouts. Those with an advantage of zero have no gradient and are left out.

    Returns:
        The rows of the first minibatch and their log-probabilities by the weights that have sampled them. Where all
        groups agree, which happens near the end of a training, there are none, and the model stays as it is.
    """
    with_gradient = (batch.advantages != 0).nonzero()[:, 0]
    if not len(with_gradient):
        return with_gradient, batch.generation_logprobs[with_gradient]
    tokens = batch.loss_mask.sum() / minibatches
    shuffled = [with_gradient[torch.randperm(len(with_gradient))].chunk(minibatches) for _ in range(EPOCHS)]
    computed = []
    for rows in chain.from_iterable(shuffled):
        optimizer.zero_grad()
        computed.append((rows, add_gradients(model, batch, rows, tokens)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
    return computed[0]


def mean_distance(batch: RolloutTensors, rows: torch.Tensor, logprobs: torch.Tensor) -> float:
    """The mean distance of the log-probabilities from those of the service. Of equal weights it is rounding."""
    distances = (logprobs - batch.generation_logprobs[rows]).abs()[batch.loss_mask[rows].bool()]
    return float(distances.mean()) if len(distances) else 0.0


def add_gradients(model: Any, batch: RolloutTensors, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Adds the gradients of PPO's clipped objective, negated, summed over the generated tokens of `rows` and divided.

    Returns:
        The log-probabilities of the generated tokens, float32 [len(rows), T]; 0 for others.
    """
    computed = torch.zeros(len(rows), batch.input_ids.shape[1])
    # Nothing before the first generated token or after the last one is in the loss.
    first = int(batch.prompt_lengths[rows].min())
    last = int(batch.loss_mask[rows].any(0).nonzero().max()) + 1
    bytes_of_a_row = (last - first) * model.config.get_text_config().vocab_size * 4
    at_once = max(1, LOGITS_BYTES // bytes_of_a_row)
    for some, kept in zip(rows.split(at_once), computed.split(at_once), strict=True):
        mask = batch.loss_mask[some, first:last].bool()
        input_ids = batch.input_ids[some, :last]
        # Padding is on the right, which causal attention does not see: no attention mask is needed.
        logits = model(input_ids=input_ids, logits_to_keep=last - first + 1).logits[:, :-1][mask]
        logprobs = logits.gather(1, input_ids[:, first:][mask][:, None])[:, 0] - logits.logsumexp(-1)
        ratio = (logprobs - batch.generation_logprobs[some, first:last][mask]).exp()
        advantages = batch.advantages[some, None].expand_as(mask)[mask]
        loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).sum()
        (loss / tokens).backward()
        kept[:, first:last][mask] = logprobs.detach()
    return computed


def summary(history: list[Figures]) -> Figures:
    """First and last accuracy on the questions held out, and the largest distance of the log-probabilities."""
    figures = {"held_out_before": history[0]["held_out"], "held_out_after": history[-1]["held_out"]}
    if differences := [step["difference"] for step in history if "difference" in step]:
        figures["largest_mean_logprob_difference"] = max(differences)
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = parser().parse_args()
    with RolloutClient(options.url) as client:
        client.wait_until_ready()
        sys.stdout.write(f"{json.dumps(summary(train(options, client)))}\n")


if __name__ == "__main__":
    main()
