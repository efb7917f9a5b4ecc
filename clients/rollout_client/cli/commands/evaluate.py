"""`rollout eval`: pass@k of a policy, by task, with confidence intervals.

pass@k is the chance that one of k rollouts of a prompt passes. Its estimate for a prompt with n rollouts of which c
pass is 1 - C(n-c, k) / C(n, k), which has no bias (Chen et al. 2021, arXiv:2107.03374, equation 1). The estimate of a
task is the mean over its prompts.

The interval is Wilson's score interval for that mean over the prompts. A prompt's value lies between 0 and 1, so its
variance is at most that of a proportion with the same mean: the interval is never too narrow for its level, and it
keeps a width where every prompt passes or none does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import chain
from math import comb
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rollout_client.calls.rollouts import RolloutOptions
from rollout_client.cli.options import (
    DEFAULT_CHUNK_SIZE,
    DEFAULT_MAX_ERROR_RATE,
    ChunkSize,
    Connection,
    MaxErrorRate,
    Overwrite,
    command,
)
from rollout_client.cli.output import AsJson, check_error_rate, plain, show, table
from rollout_client.cli.run.inputs import samples_of
from rollout_client.cli.run.player import RunPlayer, play_groups
from rollout_client.cli.run.totals import totals_of
from rollout_client.cli.transcript import totals_table
from rollout_client.contract.rollouts import SampleResult
from rollout_client.results import final_reward, wilson_interval

ALL_TASKS = "all"


@dataclass(frozen=True, slots=True)
class PassAtK:
    task_name: str
    k: int
    value: float | None
    """Mean over the prompts; `None` without one that can be counted."""
    low: float | None
    high: float | None
    """Ends of the interval."""
    prompts: int
    """Prompts that are counted: those with at least k rollouts that have a final reward."""
    left_out: int
    """Prompts with fewer: too many of their rollouts failed or were cut off."""
    clipped_ratio: float | None
    """Share of the task's responses that their length has cut; `None` without one."""


def pass_at_k(
    groups: Iterable[Sequence[SampleResult]], ks: Sequence[int], passes_at: float, confidence: float
) -> list[PassAtK]:
    """For each task, and for all together if there are several, each k.

    Args:
        groups: the rollouts of one prompt each.
        passes_at: a rollout passes with this reward or a higher one.
        confidence: the level of the interval, between 0 and 1.
    """
    by_task: dict[str, list[Sequence[SampleResult]]] = {}
    for group in groups:
        by_task.setdefault(group[0].task_name, []).append(group)
    if len(by_task) > 1:
        by_task[ALL_TASKS] = list(chain.from_iterable(by_task.values()))
    return [_of_task(name, k, of, passes_at, confidence) for name, of in by_task.items() for k in ks]


def _of_task(
    task_name: str, k: int, groups: Sequence[Sequence[SampleResult]], passes_at: float, confidence: float
) -> PassAtK:
    rewards = [[reward for sample in group if (reward := final_reward(sample)) is not None] for group in groups]
    passed = [(len(each), sum(reward >= passes_at for reward in each)) for each in rewards if len(each) >= k]
    mean = sum(estimate(*counts, k) for counts in passed) / len(passed) if passed else None
    low, high = (None, None) if mean is None else wilson_interval(mean, len(passed), confidence)
    clipped = totals_of(chain.from_iterable(groups)).clipped_ratio
    return PassAtK(task_name, k, mean, low, high, len(passed), len(groups) - len(passed), clipped)


def estimate(total: int, passed: int, k: int) -> float:
    """The chance that k of `total` rollouts, drawn without putting back, hold one of the `passed`. `total` >= k."""
    return 1.0 - comb(total - passed, k) / comb(total, k)


@command
def evaluate(
    options: RolloutOptions,
    service: Connection,
    tasks: Annotated[list[str] | None, typer.Argument(help="Names from `rollout tasks`, or else --samples.")] = None,
    samples: Annotated[str | None, typer.Option(help="Samples of your own, as `rollout run` takes them.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Samples of a task; by default all, or 64.")] = None,
    ids: Annotated[list[str] | None, typer.Option("--id", help="Only samples with this id, or pattern.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Chooses the samples of a task.")] = None,
    split: Annotated[str | None, typer.Option(help="Of the task's data, or of the data set of --samples.")] = None,
    ks: Annotated[list[int] | None, typer.Option("--k", min=1, help="By default 1 and --num-generations.")] = None,
    passes_at: Annotated[float, typer.Option(help="A rollout passes with this reward or a higher one.")] = 1.0,
    confidence: Annotated[float, typer.Option(min=0.01, max=0.999, help="Level of the intervals.")] = 0.95,
    output: Annotated[Path | None, typer.Option(help="Append the rollouts here; run again, it goes on.")] = None,
    overwrite: Overwrite = False,
    chunk_size: ChunkSize = DEFAULT_CHUNK_SIZE,
    max_error_rate: MaxErrorRate = DEFAULT_MAX_ERROR_RATE,
    as_json: AsJson = False,
) -> None:
    """Estimate pass@k by task, with confidence intervals.

    `--policy-version` names the weights: a rollout that would need others fails. pass@k is estimated without bias
    (arXiv:2107.03374); the interval is Wilson's, over prompts. `clipped` is the share of a task's responses that their
    length has cut.
    """
    generations = options["num_generations"] or 1
    wanted = sorted(set(ks or (1, generations)))
    if wanted[-1] > generations:
        raise ValueError(f"--k {wanted[-1]} needs as many rollouts: raise --num-generations, which is {generations}.")
    with service.client() as client:
        given = _with_ids(samples_of(client, tasks or [], samples, count, seed, split), ids)
    groups = play_groups(RunPlayer(service, given, options, chunk_size), output, overwrite)
    totals = totals_of(chain.from_iterable(groups))
    found = pass_at_k(groups, wanted, passes_at, confidence)
    versions = sorted({version for group in groups for version in _versions_of(group)})
    result = {"versions": versions, "confidence": confidence, "pass_at_k": [*map(asdict, found)]}
    show({**totals.document(), **result}, as_json, _pass_table(found, versions, confidence), totals_table(totals))
    check_error_rate(totals.error_rate, max_error_rate)


def _with_ids(samples: list[dict[str, Any]], patterns: Sequence[str] | None) -> list[dict[str, Any]]:
    """Those whose `id` matches a pattern; all without patterns. Raises `ValueError` for a pattern that matches none."""
    if not patterns:
        return samples
    ids = [sample.get("id") or "" for sample in samples]
    chosen = set[str]()
    for pattern in patterns:
        found = {each for each in ids if each and (each == pattern or fnmatchcase(each, pattern))}
        if not found:
            some = ", ".join(filter(None, ids[:5])) or "none"
            raise ValueError(f"--id {pattern} matches none of the {len(ids)} samples; their ids are such as {some}.")
        chosen |= found
    return [sample for sample, id_ in zip(samples, ids, strict=True) if id_ in chosen]


def _versions_of(group: list[SampleResult]) -> set[str]:
    """The weights that generated, as `weight_versions` names them."""
    return {
        span.version for sample in group for message in sample.message_log for span in message.weight_versions or ()
    }


def _pass_table(found: list[PassAtK], versions: list[str], confidence: float) -> Table:
    title = f"pass@k, {confidence:.0%} intervals, version {', '.join(versions) or 'unknown'}"
    rows = [
        (
            plain(row.task_name),
            str(row.k),
            *("" if value is None else f"{value:.3f}" for value in (row.value, row.low, row.high)),
            str(row.prompts),
            str(row.left_out),
            "" if row.clipped_ratio is None else f"{row.clipped_ratio:.1%}",
        )
        for row in found
    ]
    return table(title, ("task", ">k", ">pass@k", ">low", ">high", ">prompts", ">left out", ">clipped"), rows)
