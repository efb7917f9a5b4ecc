"""How many tokens a training step computes where shared prefixes stand once: `python -m benchmarks merge`.

Rollouts of random tokens become tensors with `merge="prefix"`: groups of 8 with prompts of several lengths, and runs of
agents with 20 branches. Counted are the tokens of all rollouts and branches, those of the merged rows, and the places
of both with their padding. The last line is JSON.
"""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rollout_client.contract.messages import Branch, Message
from rollout_client.contract.rollouts import SampleMetrics, SampleResult
from rollout_client.tensors import to_tensors

VOCABULARY = 32_000
GROUPS, GROUP_SIZE = 16, 8
PROMPTS = (512, 2048, 8192)
SHORTEST_RESPONSE, LONGEST_RESPONSE = 128, 1024
AGENT_GROUPS, AGENT_GROUP_SIZE, BRANCHES = 4, 8, 20
AGENT_PROMPT, OBSERVATION, AGENT_RESPONSE = 2048, 256, 128
console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one batch."""

    rows: int
    """Rollouts and branches."""
    tokens: int
    """Of all rows, each for itself."""
    merged_tokens: int
    ratio: float
    """Merged tokens to tokens."""
    places: int
    """Of the rows, padded to the longest."""
    merged_places: int
    """Of the packed rows, padded likewise."""
    seconds: float
    """To make the tensors."""


def main(
    token_budget: Annotated[int, typer.Option(min=1, help="Most tokens of a packed row.")] = 32_768,
    seed: int = 0,
) -> None:
    draw = random.Random(seed)
    batches: dict[str, Callable[[], list[SampleResult]]] = {
        f"prompts of {prompt:,}": partial(groups_of, prompt, draw) for prompt in PROMPTS
    }
    batches["agents"] = partial(agent_runs, draw)
    figures = {name: figures_of(batch(), token_budget) for name, batch in batches.items()}
    table = Table("batch", "rows", "tokens", "merged", "of tokens", "places", "merged places", "s")
    for name, each in figures.items():
        counts = (f"{count:,}" for count in (each.rows, each.tokens, each.merged_tokens))
        places = (f"{count:,}" for count in (each.places, each.merged_places))
        table.add_row(name, *counts, f"{each.ratio:.2f}", *places, f"{each.seconds:.1f}")
    console.print(table)
    typer.echo(json.dumps({name: asdict(each) for name, each in figures.items()}))


def figures_of(samples: list[SampleResult], token_budget: int) -> Figures:
    began = perf_counter()
    tensors = to_tensors(samples, pad_token_id=0, merge="prefix", token_budget=token_budget)
    seconds = perf_counter() - began
    tokens, merged_tokens = int(tensors.lengths.sum()), int(tensors.merged.lengths.sum())
    return Figures(
        rows=len(tensors.input_ids),
        tokens=tokens,
        merged_tokens=merged_tokens,
        ratio=round(merged_tokens / tokens, 3),
        places=tensors.input_ids.numel(),
        merged_places=tensors.merged.input_ids.numel(),
        seconds=round(seconds, 2),
    )


def groups_of(prompt_tokens: int, draw: random.Random) -> list[SampleResult]:
    """One response to each prompt."""
    return [
        result(idx, place, [[prompt, response(draw.randint(SHORTEST_RESPONSE, LONGEST_RESPONSE), draw)]])
        for idx in range(GROUPS)
        for prompt in [given(prompt_tokens, draw)]
        for place in range(GROUP_SIZE)
    ]


def agent_runs(draw: random.Random) -> list[SampleResult]:
    """Each branch goes on by two turns from a response of an earlier one, as a conversation that was edited there."""
    samples = []
    for idx in range(AGENT_GROUPS):
        prompt = given(AGENT_PROMPT, draw)
        for place in range(AGENT_GROUP_SIZE):
            branches = [[prompt, *turns(2, draw)]]
            while len(branches) < BRANCHES:
                before = draw.choice(branches)
                kept = 2 * draw.randint(1, len(before) // 2)
                branches.append([*before[:kept], given(OBSERVATION, draw), *turns(2, draw)])
            samples.append(result(idx, place, branches[::-1]))
    return samples


def turns(count: int, draw: random.Random) -> list[Message]:
    """`count` responses with observations between them."""
    messages = [response(AGENT_RESPONSE, draw)]
    for _ in range(count - 1):
        messages += [given(OBSERVATION, draw), response(AGENT_RESPONSE, draw)]
    return messages


def given(count: int, draw: random.Random) -> Message:
    return Message(role="user", content="", token_ids=[draw.randrange(VOCABULARY) for _ in range(count)])


def response(count: int, draw: random.Random) -> Message:
    token_ids = [draw.randrange(VOCABULARY) for _ in range(count)]
    return Message(role="assistant", content="", token_ids=token_ids, generation_logprobs=[-draw.random()] * count)


def result(idx: int, generation_index: int, logs: list[list[Message]]) -> SampleResult:
    """A rollout with the first log, and the others as its branches."""
    log, *others = logs
    return SampleResult(
        idx=idx,
        generation_index=generation_index,
        task_name="math",
        message_log=log,
        total_reward=generation_index % 2,
        rewards={},
        status="completed",
        terminated=True,
        truncated=False,
        max_turns_reached=False,
        extra_env_info={},
        branches=[Branch(message_log=other) for other in others],
        metrics=SampleMetrics(
            turn_count=1,
            total_tokens=0,
            assistant_tokens=0,
            env_tokens=0,
            terminated=True,
            truncated=False,
            max_turns_reached=False,
            total_reward=0.0,
            turn_gen_tokens=[],
        ),
    )


if __name__ == "__main__":
    typer.run(main)
