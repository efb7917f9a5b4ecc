"""Trains the embedded model twice on sliding puzzles, by GRPO and by trees of forks, and compares them by their tokens.

Learn from it how rollouts are forked and how their trees train: of each prompt fewer rollouts are played, each is
forked at a turn, and a step has the advantage that the leaves below it have over those of its siblings.
"""

# mypy: disable-error-code="no-untyped-call"

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from ray.serve.schema import ServeDeploySchema
from rich.console import Console

from deployments.tasks.sliding_puzzle import game_sample
from examples.train_filtered import draw, reached, tokens_until
from examples.train_grpo import (
    CLIP,
    EMBEDDED,
    GRADIENT_NORM,
    Curve,
    CurveOption,
    Policy,
    SeedOption,
    UrlOption,
    generated_tokens,
    mean_reward,
    model_to_train,
    pusher,
    running_service,
)
from rollout_client import RolloutClient, RolloutResponse, SampleInput, SampleResult, Sampling
from rollout_client.tensors import MergedRows, MergedTensors, to_tensors
from service.startup.config import BUNDLED, config_of, free_port
from service.startup.generated_config import EMBEDDED_MODEL, ServedModel, generated_config

LEARNING_RATE = 2e-4
MOST_MOVES = 6
SHUFFLED = (2, 5)
"""Moves from the solved board, at least and at most."""
SAMPLING = Sampling(temperature=1.0, max_new_tokens=24)
GROUP_SIZE = 8
"""Rollouts of a prompt in GRPO."""
TRUNKS, FORKS = 4, 2
"""Rollouts of a prompt that are played from its beginning, and how often each is forked. A fork at a random turn plays
half of the turns on average, so that a tree of 12 leaves takes about the tokens of a group of 8."""
HELD_OUT = 200
MEASUREMENTS = 5
MINIBATCHES = 4
"""Steps of the optimizer for the rollouts of one step."""
Part = tuple[MergedRows, torch.Tensor]
"""One row of merged tokens, and their advantages."""


class Batch(NamedTuple):
    """The rollouts of one step."""

    samples: list[SampleResult]
    tokens: int
    """Generated for them."""
    reward: float
    """The mean of those that were played from the prompt."""


Play = Callable[[RolloutClient, list[SampleInput], int], Batch]
Weigh = Callable[[MergedTensors], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train."""

    play: Play
    advantages: Weigh
    """Of the tokens of merged rows, [R, N]."""


def main(
    url: UrlOption = None,
    steps: Annotated[int, typer.Option(min=MEASUREMENTS)] = 20,
    prompts_per_step: Annotated[int, typer.Option(min=1)] = 16,
    seed: SeedOption = 0,
    curve: CurveOption = Path("train-tree.png"),
) -> None:
    """Prints as its last line, in JSON, the tokens that each training generated until both had reached an accuracy.

    The trees are trained until they have generated as many tokens as GRPO in its steps.
    """
    console = Console(stderr=True)
    random.seed(seed)
    arms = {"GRPO": Arm(play_groups, group_advantages), "trees": Arm(tree_player(random.Random(seed)), tree_advantages)}
    curves: dict[str, Curve] = {}
    with running_service(config_with_records, url, console) as client:
        for name, arm in arms.items():
            budget = max(curves["GRPO"].tokens.values()) if curves else None
            curves[name] = trained(client, name, arm, steps, prompts_per_step, budget, seed, console)
    draw(curves, curve, "games held out that are solved")
    console.print(f"The curves are in {curve}.")
    typer.echo(json.dumps(compared(*curves.values())))


def config_with_records() -> ServeDeploySchema:
    raw = generated_config(ServedModel(str(EMBEDDED_MODEL), gpus=0), ["sliding_puzzle"], {"port": free_port()}, {})
    raw["applications"][0]["args"]["rollout_records"] = {}
    return config_of(raw, BUNDLED / "serve_config.yaml")


def trained(
    client: RolloutClient,
    name: str,
    arm: Arm,
    steps: int,
    prompts_per_step: int,
    budget: int | None,
    seed: int,
    console: Console,
) -> Curve:
    """Trains for `steps`, or until `budget` tokens were generated."""
    recipe = EMBEDDED._replace(steps=steps, learning_rate=LEARNING_RATE)
    model, optimizer, schedule = model_to_train(str(EMBEDDED_MODEL), recipe, seed)
    push = pusher(client, model, False)
    version = push()
    prompts, held_out = random.Random(seed), games(random.Random(-1), HELD_OUT)
    curve = Curve(name)
    curve.held_out[0] = solved(client, held_out, version)
    step = 0
    while (step < steps) if budget is None else (curve.tokens[step] < budget):
        step += 1
        batch = arm.play(client, games(prompts, prompts_per_step), version)
        curve.reward[step] = batch.reward
        curve.tokens[step] = curve.tokens[step - 1] + batch.tokens
        curve.difference[step] = improve(model, optimizer, batch.samples, arm.advantages)
        if step < steps:
            schedule.step()
        version = push()
        share = step / steps if budget is None else curve.tokens[step] / budget
        if share >= len(curve.held_out) / MEASUREMENTS:
            curve.held_out[step] = solved(client, held_out, version)
        console.print(f"{name}, step {step}: {curve.tokens[step]:,} tokens, {curve.latest}")
    return curve


def games(draw: random.Random, count: int) -> list[SampleInput]:
    samples = [game_sample(2, draw.randrange(2**31), draw.randint(*SHUFFLED)) for _ in range(count)]
    for sample in samples:
        sample |= {"task_name": "sliding_puzzle"}
        sample["extra_env_info"]["max_moves"] = MOST_MOVES
    return [SampleInput.model_validate(sample) for sample in samples]


def played(client: RolloutClient, samples: Sequence[SampleInput], count: int, version: int) -> RolloutResponse:
    return client.rollout(
        samples,
        num_generations=count,
        sampling=SAMPLING,
        max_rollout_turns=MOST_MOVES,
        policy={"min_version": version},
    )


def solved(client: RolloutClient, held_out: Sequence[SampleInput], version: int) -> float:
    """The share of the games held out that are solved, from 0 to 1."""
    return mean_reward(played(client, held_out, 2, version))


def play_groups(client: RolloutClient, prompts: list[SampleInput], version: int) -> Batch:
    response = played(client, prompts, GROUP_SIZE, version)
    return Batch(response.samples, generated_tokens(response), mean_reward(response))


def tree_player(draw: random.Random) -> Play:
    """Plays trees, which are forked at turns that `draw` chooses."""

    def play(client: RolloutClient, prompts: list[SampleInput], version: int) -> Batch:
        trunks = played(client, prompts, TRUNKS, version)
        leaves = played(
            client, [fork_of(trunk, draw) for trunk in trunks.samples if trunk.error is None], FORKS, version
        )
        tokens = generated_tokens(trunks) + generated_tokens(leaves)
        return Batch([*trunks.samples, *leaves.samples], tokens, mean_reward(trunks))

    return play


def fork_of(trunk: SampleResult, draw: random.Random) -> SampleInput:
    """A further try from one of its turns. It has the trunk's `idx`: all leaves of a prompt are one group."""
    turns = sum(message.generation_logprobs is not None for message in trunk.message_log)
    fork = {"rollout": trunk.rollout_id, "turn": draw.randrange(turns)}
    return SampleInput.model_validate({"task_name": trunk.task_name, "idx": trunk.idx, "fork": fork})


def group_advantages(tensors: MergedTensors) -> torch.Tensor:
    """GRPO: each token has that of its rollout; one that several share, the mean."""
    return tensors.merged.advantages


def tree_advantages(tensors: MergedTensors) -> torch.Tensor:
    return tensors.merged.step_advantages(tensors.advantages)


def improve(
    model: Policy, optimizer: torch.optim.Optimizer, samples: Sequence[SampleResult], advantages_of: Weigh
) -> float:
    """Trains once on each token that was generated, with PPO's clipped objective.

    Returns:
        The mean distance of the log-probabilities from those of the service, on the first minibatch.
    """
    tensors = to_tensors(samples, pad_token_id=0, merge="prefix")
    advantages = advantages_of(tensors)
    # Rows whose advantages are all zero have no gradient.
    parts = [
        (part, advantages[number : number + 1])
        for number, part in enumerate(tensors.merged.split())
        if advantages[number].any()
    ]
    random.shuffle(parts)
    differences = []
    for some in minibatches(parts):
        tokens = sum(int(rows.loss_mask.sum()) for rows, _ in some)
        optimizer.zero_grad()
        differences += [add_gradients(model, rows, gained, tokens) for rows, gained in some]
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
    return differences[0] if differences else 0.0


def minibatches(parts: Sequence[Part]) -> list[Sequence[Part]]:
    size = -(-len(parts) // MINIBATCHES)
    return [parts[begin : begin + size] for begin in range(0, len(parts), size or 1)]


def add_gradients(model: Policy, rows: MergedRows, advantages: torch.Tensor, tokens: int) -> float:
    """Adds the gradients of the objective, negated, summed over the tokens of the rows and divided by `tokens`."""
    logits = model(input_ids=rows.input_ids, position_ids=rows.position_ids, attention_mask=rows.dense_mask()).logits
    mask = rows.loss_mask.bool()
    logprobs, sampled_with = rows.token_logprobs(logits)[mask], rows.generation_logprobs[mask]
    ratio, gained = (logprobs - sampled_with).exp(), advantages[mask]
    loss = -torch.minimum(ratio * gained, ratio.clamp(1 - CLIP, 1 + CLIP) * gained).sum()
    (loss / tokens).backward()
    return float((logprobs.detach() - sampled_with).abs().mean())


def compared(grpo: Curve, trees: Curve) -> dict[str, float]:
    """Tokens until both had solved the same share of games, and what each solves after all of its tokens."""
    share = reached(grpo, trees)
    of_grpo, of_trees = (tokens_until(share, curve) for curve in (grpo, trees))
    return {
        "solved_before": round(grpo.held_out[0], 4),
        "solved_by_grpo": round([*grpo.held_out.values()][-1], 4),
        "solved_by_trees": round([*trees.held_out.values()][-1], 4),
        "tokens": max(grpo.tokens.values()),
        "solved_by_both": round(share, 4),
        "tokens_of_grpo": round(of_grpo),
        "tokens_of_trees": round(of_trees),
    }


if __name__ == "__main__":
    typer.run(main)
