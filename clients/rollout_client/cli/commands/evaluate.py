"""`rollout eval`: pass@k of a policy, by task, with confidence intervals.

pass@k is the chance that one of k rollouts of a prompt passes. Its estimate for a prompt with n rollouts of which c
pass is 1 - C(n-c, k) / C(n, k), which has no bias (Chen et al. 2021, arXiv:2107.03374, equation 1). The estimate of a
task is the mean over its prompts.

The interval is Wilson's score interval for that mean over the prompts. A prompt's value lies between 0 and 1, so its
variance is at most that of a proportion with the same mean: the interval is never too narrow for its level, and it
keeps a width where every prompt passes or none does.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from itertools import chain
from math import comb
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.table import Table

from rollout_client.calls.rollouts import RolloutOptions
from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.cli.commands.league import (
    league_document,
    league_table,
    play_league,
    ratings_of,
    refuse_beside_a_league,
)
from rollout_client.cli.options import (
    DEFAULT_CHUNK_SIZE,
    DEFAULT_MAX_ERROR_RATE,
    ChunkSize,
    Connection,
    MaxErrorRate,
    command,
)
from rollout_client.cli.output import AsJson, check_error_rate, plain, show
from rollout_client.cli.run.inputs import read_samples
from rollout_client.cli.run.player import RunPlayer, RunStopped, groups_in, play_in_memory, play_to_file
from rollout_client.cli.run.totals import Totals
from rollout_client.cli.transcript import totals_table
from rollout_client.contract.rollouts import SampleResult
from rollout_client.data_out.evaluation import Evaluation, EvaluationStatus
from rollout_client.data_out.evaluation_file import EvaluationFile, EvaluationFormat
from rollout_client.errors import RolloutError
from rollout_client.results import final_reward, finish_reasons, wilson_interval

ALL_TASKS = "all"


@dataclass(slots=True)
class TaskCounts:
    """Counts of one task."""

    prompts: list[tuple[int, int]] = field(default_factory=list)
    """Rollouts with a final reward, and those of them that pass, for each prompt."""
    responses: int = 0
    clipped: int = 0
    """Responses that their length has cut."""

    def __add__(self, other: "TaskCounts") -> "TaskCounts":
        return TaskCounts(self.prompts + other.prompts, self.responses + other.responses, self.clipped + other.clipped)


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
    by_task: dict[str, TaskCounts] = {}
    for group in groups:
        rewards = [reward for sample in group if (reward := final_reward(sample)) is not None]
        passed = sum(reward >= passes_at for reward in rewards)
        counts = by_task.setdefault(group[0].task_name, TaskCounts())
        counts.prompts.append((len(rewards), passed))
        reasons = [reason for sample in group for reason in finish_reasons(sample)]
        counts.responses += len(reasons)
        counts.clipped += reasons.count("length")
    if len(by_task) > 1:
        by_task[ALL_TASKS] = sum(by_task.values(), TaskCounts())
    return [of_task(task_name, k, counts, confidence) for task_name, counts in by_task.items() for k in ks]


def of_task(task_name: str, k: int, counts: TaskCounts, confidence: float) -> PassAtK:
    values = [estimate(total, passed, k) for total, passed in counts.prompts if total >= k]
    left_out = len(counts.prompts) - len(values)
    clipped_ratio = counts.clipped / counts.responses if counts.responses else None
    if not values:
        return PassAtK(task_name, k, None, None, None, 0, left_out, clipped_ratio)
    mean = sum(values) / len(values)
    low, high = wilson_interval(mean, len(values), confidence)
    return PassAtK(task_name, k, mean, low, high, len(values), left_out, clipped_ratio)


def estimate(total: int, passed: int, k: int) -> float:
    """The chance that k of `total` rollouts, drawn without putting back, hold one of the `passed`. `total` >= k."""
    return 1.0 - comb(total - passed, k) / comb(total, k)


@command
def evaluate(
    options: RolloutOptions,
    service: Connection,
    tasks: Annotated[
        list[str] | None, typer.Argument(help="Names from `rollout tasks`; by default those of --samples.")
    ] = None,
    samples: Annotated[str | None, typer.Option(help="Samples of your own, as `rollout run` takes them.")] = None,
    count: Annotated[
        int | None,
        typer.Option(
            min=1, help="Samples of each task; by default all where it says how many, such as Harbor's, or 64."
        ),
    ] = None,
    ids: Annotated[
        list[str] | None,
        typer.Option(
            "--id", help="Only samples with such an id: a name, or a pattern as in 'fix-*'; can be given again."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Chooses the samples of a task.")] = None,
    split: Annotated[str | None, typer.Option(help="Of the task's data, or of the data set of --samples.")] = None,
    ks: Annotated[
        list[int] | None, typer.Option("--k", min=1, help="By default 1 and --num-generations; can be given again.")
    ] = None,
    passes_at: Annotated[float, typer.Option(help="A rollout passes with this reward or a higher one.")] = 1.0,
    confidence: Annotated[float, typer.Option(min=0.01, max=0.999, help="Level of the intervals.")] = 0.95,
    league: Annotated[
        list[str] | None,
        typer.Option(help="A policy of a league: current, NAME, NAME/VERSION or VERSION; give it again for each."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Append the rollouts here, as `rollout run` does; run again, it goes on.")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            help="Write the evaluation here as --format says: a folder for harbor, a .json or .eval for inspect."
        ),
    ] = None,
    format: Annotated[EvaluationFormat | None, typer.Option(help="Whose format --results has.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew in place of going on, and replace --results.")
    ] = False,
    chunk_size: ChunkSize = DEFAULT_CHUNK_SIZE,
    max_error_rate: MaxErrorRate = DEFAULT_MAX_ERROR_RATE,
    as_json: AsJson = False,
) -> None:
    """Estimate pass@k by task, with confidence intervals.

    `--policy-version` names the weights: a rollout that would need others fails. pass@k is estimated without bias
    (arXiv:2107.03374); the interval is Wilson's, over prompts. `clipped` is the share of a task's responses that their
    length has cut.

    `--results` with `--format` writes the same for other evaluators' viewers: Harbor's or inspect's. An evaluation that
    is stopped, or fails, leaves there what had ended, and says so.

    With `--league` the policies play the task, a game of two seats, against each other: each sample with each pair, in
    both orders. The answer is their Elo.
    """
    if league is not None:
        beside = {"--samples": samples, "--k": ks, "--output": output, "--results": results, "--format": format}
        refuse_beside_a_league(league, tasks or [], options, beside)
        with service.client() as client:
            given = with_ids(samples_of(client, tasks or [], None, count, seed, split), ids)
        totals = Totals()
        games = play_league(service, given, league, options, chunk_size, totals)
        ratings = ratings_of(games, league, confidence)
        rated = {**totals.document(), **league_document(ratings, games, confidence)}
        show(rated, as_json, league_table(ratings, games, confidence), totals_table(totals))
        check_error_rate(totals.error_rate, max_error_rate)
        return
    generations = options["num_generations"] or 1
    wanted = sorted(set(ks or (1, generations)))
    if wanted[-1] > generations:
        raise ValueError(f"--k {wanted[-1]} needs as many rollouts: raise --num-generations, which is {generations}.")
    if (results is None) != (format is None):
        raise ValueError("--results and --format belong together: name both, or none.")
    file = None if results is None or format is None else EvaluationFile(results, format, overwrite)
    with service.client() as client:
        given = with_ids(samples_of(client, tasks or [], samples, count, seed, split), ids)
        info = None if file is None else client.info()
    if file is not None:
        file.check(sorted({sample["task_name"] for sample in given}))
    player = RunPlayer(service, given, options, chunk_size)
    begun_at = datetime.now(UTC)
    groups: dict[int, list[SampleResult]] = {}
    interruption: BaseException | None = None
    try:
        if output is None:
            play_in_memory(player, Totals(), groups)
        else:
            play_to_file(player, output, overwrite)
    except (KeyboardInterrupt, RunStopped, RolloutError) as error:
        if file is None:
            raise
        interruption = error
    if output is not None:
        groups = groups_in(output)
    totals = Totals()
    for sample in chain.from_iterable(groups.values()):
        totals.add_result(sample)
    found = pass_at_k(groups.values(), wanted, passes_at, confidence)
    versions = sorted({span for group in groups.values() for span in versions_of(group)})
    document = {
        **totals.document(),
        "versions": versions,
        "confidence": confidence,
        "pass_at_k": list(map(asdict, found)),
    }
    if file is not None and info is not None:
        evaluation = Evaluation(
            samples=player.samples,
            groups=groups,
            arrivals=player.arrivals,
            options=cast(Mapping[str, Any], options),
            url=service.url,
            info=info,
            begun_at=begun_at,
            ended_at=datetime.now(UTC),
            pass_at_k=by_task_and_k(found),
            document={**document, "passes_at": passes_at, "options": options},
            status=status_of(interruption),
            reason="" if interruption is None else str(interruption) or "Stopped by the user.",
        )
        file.write(evaluation)
    if isinstance(interruption, KeyboardInterrupt):
        raise RunStopped(f"Stopped: {results} has what had ended.") from interruption
    if interruption is not None:
        raise interruption
    show(document, as_json, pass_table(found, versions, confidence), totals_table(totals))
    check_error_rate(totals.error_rate, max_error_rate)


def status_of(interruption: BaseException | None) -> EvaluationStatus:
    if interruption is None:
        return "success"
    return "error" if isinstance(interruption, RolloutError) else "cancelled"


def by_task_and_k(found: Iterable[PassAtK]) -> dict[str, dict[int, float]]:
    """The known values."""
    values: dict[str, dict[int, float]] = {}
    for each in found:
        if each.value is not None:
            values.setdefault(each.task_name, {})[each.k] = each.value
    return values


DEFAULT_COUNT = 64


def samples_of(
    client: RolloutClient,
    tasks: list[str],
    source: str | None,
    count: int | None,
    seed: int | None,
    split: str | None,
) -> list[dict[str, Any]]:
    """Those of a file or data set, or else `count` of each task of the service.

    Without a count they are all of a task that says how many it has, or else `DEFAULT_COUNT`.
    """
    if bool(tasks) == (source is not None):
        raise ValueError("Name tasks of the service, or samples with --samples: one of both.")
    if source is not None:
        return read_samples(source, split=split or "train")
    return [sample for task in tasks for sample in samples_of_task(client, task, count, seed, split)]


def samples_of_task(
    client: RolloutClient, task: str, count: int | None, seed: int | None, split: str | None
) -> list[dict[str, Any]]:
    wanted = count or DEFAULT_COUNT
    page = client.task_samples(task, wanted, seed=seed, split=split)
    if count is None and page.sample_count is not None and page.sample_count != wanted:
        wanted = page.sample_count
        page = client.task_samples(task, wanted, seed=seed, split=split)
    samples = page.samples
    while len(samples) < wanted:
        if not page.samples:
            raise ValueError(f"The service gave no sample of task {task} from place {page.next_start} on.")
        page = client.task_samples(task, wanted - len(samples), page.next_start, seed=seed, split=split)
        samples = [*samples, *page.samples]
    return [sample.model_dump(mode="json", exclude_unset=True) for sample in samples]


def with_ids(samples: list[dict[str, Any]], patterns: Sequence[str] | None) -> list[dict[str, Any]]:
    """Those whose `id` matches a pattern; all without patterns. Raises `ValueError` for a pattern that matches none."""
    if not patterns:
        return samples
    ids = [sample["id"] for sample in samples if sample.get("id") is not None]
    chosen: set[str] = set()
    for pattern in patterns:
        found = {each for each in ids if each == pattern or fnmatchcase(each, pattern)}
        if not found:
            some = ", ".join(ids[:5]) or "none"
            raise ValueError(
                f"--id {pattern} matches none of the {len(samples)} samples; their ids are such as {some}."
            )
        chosen |= found
    return [sample for sample in samples if sample.get("id") in chosen]


def versions_of(group: list[SampleResult]) -> set[str]:
    """The weights that generated, as `weight_versions` names them."""
    return {
        span.version for sample in group for message in sample.message_log for span in message.weight_versions or ()
    }


def pass_table(found: list[PassAtK], versions: list[str], confidence: float) -> Table:
    title = f"pass@k, {confidence:.0%} intervals, version {', '.join(versions) or 'unknown'}"
    table = Table(title=title, title_justify="left")
    for name in ("task", "k", "pass@k", "low", "high", "prompts", "left out", "clipped"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for row in found:
        numbers = ("" if value is None else f"{value:.3f}" for value in (row.value, row.low, row.high))
        clipped = "" if row.clipped_ratio is None else f"{row.clipped_ratio:.1%}"
        table.add_row(plain(row.task_name), str(row.k), *numbers, str(row.prompts), str(row.left_out), clipped)
    return table
