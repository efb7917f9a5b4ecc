"""`rollout export`, `rejudge` and `replay`: stored rollouts as training data, judged again, and generated again."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.table import Table

from rollout_client.calls.rejudge import RejudgedRollout, Rejudgement
from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.cli.options import Connection, command
from rollout_client.cli.output import FAILED, AsJson, fact_table, number, plain, show, value_table
from rollout_client.cli.run.inputs import read_samples
from rollout_client.contract.records import ReplayedGeneration, ReplayResponse, TokenDifference
from rollout_client.contract.rollouts import SampleResult, SampleStatus
from rollout_client.data_out.export import Export, ExportFormat, ExportSelection, export_rollouts
from rollout_client.data_out.files import read_rollouts
from rollout_client.data_out.image_folder import ImageFolder
from rollout_client.data_out.training_rows import Turns
from rollout_client.errors import error_of_problem, needed_for
from rollout_client.results import FINAL_STATUSES

ARROW_ANSWER = ".arrow"
File = Annotated[
    Path | None,
    typer.Argument(
        help="Rollouts of `rollout run` or of `save`, or an answer: .jsonl, .parquet, .json, .ndjson, .arrow."
    ),
]
Job = Annotated[str | None, typer.Option(help="In place of FILE: a job of the service, once it has ended.")]


def stored_rollouts(file: Path | None, job: str | None, service: Connection) -> Iterator[SampleResult]:
    """Raises `ValueError` unless one of `file` and `job` is given, and what reading it raises."""
    if (file is None) == (job is None):
        raise ValueError("Name a file of rollouts, or a job of the service with --job: one of both.")
    if job is not None:
        with service.client() as client:
            yield from rollouts_of_job(client, job)
    elif file is not None and file.suffix == ARROW_ANSWER:
        with needed_for("Arrow", "arrow"):
            from rollout_client.calls.arrow_bodies import read_response
        yield from read_response(file.read_bytes()).samples
    elif file is not None:
        yield from read_rollouts(file)


def rollouts_of_job(client: RolloutClient, job_id: str) -> Iterator[SampleResult]:
    """Waits until the job has ended.

    Raises:
        ValueError: events were acknowledged, so that the service has not kept all rollouts.
        RolloutError: the job failed, or the service does not have it.
    """
    if acknowledged := client.jobs.status(job_id).acknowledged:
        raise ValueError(
            f"Job {job_id}: its events up to {acknowledged} were acknowledged, and the service keeps them no longer. "
            "Export the rollouts where they have arrived."
        )
    for event in client.jobs.events(job_id):
        if event.problem is not None:
            raise error_of_problem(event.problem)
        yield from (positioned.sample for positioned in event.samples)


@command
def export(
    service: Connection,
    format: Annotated[ExportFormat, typer.Option(help="Whose training data the rows are.")],
    output: Annotated[Path, typer.Option(help="Where the rows are written: .jsonl or .parquet.")],
    file: File = None,
    job: Job = None,
    statuses: Annotated[
        list[str] | None,
        typer.Option("--status", help="Keep this status; can be given again. By default all that have a final reward."),
    ] = None,
    best_of_group: Annotated[
        bool, typer.Option("--best-of-group", help="Keep of each group the rollout with the highest reward.")
    ] = False,
    min_reward: Annotated[float | None, typer.Option(help="Keep rollouts with this reward or a higher one.")] = None,
    min_gap: Annotated[float, typer.Option(min=0, help="dpo: least difference of the rewards of a pair.")] = 0.0,
    pairs_per_group: Annotated[
        int, typer.Option(min=1, help="dpo: most pairs of a group, the largest differences first.")
    ] = 1,
    passes_at: Annotated[float, typer.Option(help="kto: the reward from which on the label is true.")] = 1.0,
    turns: Annotated[Turns, typer.Option(help="Which responses of a rollout are trained.")] = "all",
    images: Annotated[
        Path | None,
        typer.Option(
            help="A folder where the images that rollouts show are written, or are already. Rows have their paths, "
            "those of openai data URLs. By default they have the names of images."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write stored rollouts as training data of TRL, verl, tinker or OpenAI's form.

    It says how many rollouts are in no row, and why.
    """
    if file is not None and output.resolve() == file.resolve():
        raise ValueError(f"{output} holds the rollouts: name another file for the rows.")
    selection = ExportSelection(
        statuses=statuses_of(statuses or ()) or FINAL_STATUSES,
        best_of_group=best_of_group,
        min_reward=min_reward,
        min_gap=min_gap,
        pairs_per_group=pairs_per_group,
        passes_at=passes_at,
        turns=turns,
    )
    rollouts = stored_rollouts(file, job, service)
    if images is None:
        exported = export_rollouts(rollouts, format, selection)
    else:
        with service.client() as client:
            exported = export_rollouts(rollouts, format, selection, ImageFolder(images, client.image).file)
    exported.save(output)
    document = {
        "format": format,
        "output": str(output),
        "rows": len(exported.rows),
        "rollouts": exported.rollouts,
        "left_out": exported.left_out,
        "notes": exported.notes,
    }
    show(document, as_json, export_table(exported))


def statuses_of(names: Iterable[str]) -> list[SampleStatus]:
    known = get_args(SampleStatus)
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"{unknown[0]} is not a status; there are {', '.join(known)}")
    return cast(list[SampleStatus], list(names))


def export_table(exported: Export) -> Table:
    counts: Iterable[tuple[str, Any]] = [("rows", len(exported.rows)), ("rollouts", exported.rollouts)]
    left_out = [(f"left out: {reason}", count) for reason, count in exported.left_out.items()]
    rows = [*counts, *left_out, *exported.notes.items()]
    return value_table(f"Export to {exported.format}", [(plain(name), number(count)) for name, count in rows])


DEFAULT_SHOWN = 20


@command
def rejudge(
    service: Connection,
    file: File = None,
    job: Job = None,
    task: Annotated[str | None, typer.Option(help="The task that judges; by default each rollout's own.")] = None,
    samples: Annotated[
        str | None,
        typer.Option(help="Those that were played, as `rollout run` took them: where steps change extra_env_info."),
    ] = None,
    columns: Annotated[list[str] | None, typer.Option("--map", help="FIELD=COLUMN of --samples.")] = None,
    split: Annotated[str, typer.Option(help="Of a data set of --samples.")] = "train",
    count: Annotated[int, typer.Option(min=0, help="Rollouts to show, those first that have changed.")] = DEFAULT_SHOWN,
    as_json: AsJson = False,
) -> None:
    """Judge stored rollouts again, by their environments as they are now, and show the differences.

    Nothing is generated. A rollout that cannot be judged again has a reason in place of a reward.
    """
    rollouts = list(stored_rollouts(file, job, service))
    played = None if samples is None else read_samples(samples, columns or (), task, split)
    with service.client() as client:
        found = client.rejudge(rollouts, task, samples=played)
    document = {
        "rollouts": [rejudged_document(rollout) for rollout in found.rollouts],
        "compared": len(found.compared),
        "changed": len(found.changed),
        "old_sum": found.old_sum,
        "new_sum": found.new_sum,
        "not_judged": found.not_judged,
    }
    show(document, as_json, rejudged_table(found, count), sums_table(found))


def rejudged_document(rollout: RejudgedRollout) -> dict[str, Any]:
    sample = rollout.sample
    return {
        "id": sample.id,
        "idx": sample.idx,
        "input_row": (sample.model_extra or {}).get("input_row"),
        "generation_index": sample.generation_index,
        "task_name": rollout.task_name,
        "old": rollout.old,
        "new": rollout.new,
        "rewards": rollout.rewards,
        "turns": rollout.turns,
        "reason": rollout.reason,
    }


def rejudged_table(found: Rejudgement, count: int) -> Table:
    """The rollouts with the largest differences first, then those without a new reward, then the others."""
    ordered = sorted(found.rollouts, key=lambda rollout: (-abs(rollout.difference or 0), rollout.reason is None))
    table = Table(title="Judged again", title_justify="left")
    for name in ("rollout", "task", "old", "new", "difference"):
        table.add_column(name, justify="left" if name in ("rollout", "task") else "right", overflow="fold")
    for rollout in ordered[:count]:
        sample = rollout.sample
        row = (sample.model_extra or {}).get("input_row", sample.idx)
        name = f"{row if sample.id is None else sample.id} · {sample.generation_index}"
        difference = "" if rollout.difference is None else f"{rollout.difference:+.3f}" if rollout.difference else "0"
        table.add_row(
            plain(name), plain(rollout.task_name), reward_text(rollout.old), reward_text(rollout.new), difference
        )
    return table


def reward_text(reward: float | None) -> str:
    return "-" if reward is None else number(reward)


def sums_table(found: Rejudgement) -> Table:
    sums: list[tuple[str, float]] = [
        ("rollouts", len(found.rollouts)),
        ("compared", len(found.compared)),
        ("changed", len(found.changed)),
        ("sum of old rewards", found.old_sum),
        ("sum of new rewards", found.new_sum),
    ]
    not_judged = [(f"not judged: {reason}", count) for reason, count in found.not_judged.items()]
    return value_table("Sums", [(plain(name), number(value)) for name, value in [*sums, *not_judged]])


VERDICTS = {
    "equal": "equal: the tokens and their log-probabilities",
    "equal_ids": "equal tokens; the log-probabilities differ",
    "not_compared": "not all of it could be compared",
    "parts": "it parts",
}


@command
def replay(
    service: Connection,
    file: Annotated[Path, typer.Argument(help="Rollouts of `rollout run` or of `save`, or an answer.")],
    rollout: Annotated[str, typer.Argument(metavar="ID", help="A `rollout_id`, or the row in FILE, from 0.")],
    as_json: AsJson = False,
) -> None:
    """Generate a stored rollout again under the same weights, and say whether its tokens are equal.

    The exit code is 1 if they part, or could not all be compared.
    """
    found = stored_rollout(file, rollout, service)
    with service.client() as client:
        answer = client.replay(found)
    show(answer, as_json, replay_facts(answer), replayed_table(answer.generations))
    if answer.verdict in ("parts", "not_compared"):
        raise typer.Exit(FAILED)


def stored_rollout(file: Path, name: str, service: Connection) -> SampleResult:
    """Raises `ValueError` if the file has no such rollout."""
    count = 0
    for row, sample in enumerate(stored_rollouts(file, None, service)):
        if name in (sample.rollout_id, str(row)):
            return sample
        count += 1
    raise ValueError(f"{file} has no rollout {name}: name a rollout_id of it, or a row from 0 to {count - 1}.")


def replay_facts(answer: ReplayResponse) -> Table:
    facts = [("verdict", VERDICTS[answer.verdict]), ("tokens compared", number(answer.tokens))]
    if answer.largest_difference is not None:
        facts.append(("largest difference", f"{answer.largest_difference:.2g} of two log-probabilities"))
    facts += [(name, text) for name, text in difference_facts(answer.difference)]
    return fact_table([(name, plain(text)) for name, text in [*facts, *(("note", note) for note in answer.notes)]])


def difference_facts(difference: TokenDifference | None) -> Iterator[tuple[str, str]]:
    if difference is None:
        return
    recorded, replayed = difference.recorded_id, difference.replayed_id
    yield "at", f"message {difference.message}, token {difference.token}"
    shown = "the generation had ended" if recorded is None else token_text(recorded, difference.recorded_text)
    yield "recorded", shown if recorded is None else f"{shown}, probability {probability(difference.recorded_logprob)}"
    shown = "the generation has ended" if replayed is None else token_text(replayed, difference.replayed_text)
    yield "replayed", shown if replayed is None else f"{shown}, probability {probability(difference.replayed_logprob)}"


def token_text(token_id: int, text: str | None) -> str:
    return f"{token_id}" if text is None else f"{token_id} {text!r}"


def probability(logprob: float | None) -> str:
    return "unknown" if logprob is None else f"{math.exp(min(logprob, 0.0)):.4g}"


def replayed_table(generations: Iterable[ReplayedGeneration]) -> Table:
    table = Table(title="Generations", title_justify="left")
    for name in ("message", "tokens", "version", "verdict", "largest difference", "why"):
        table.add_column(
            name, justify="right" if name in ("message", "largest difference") else "left", overflow="fold"
        )
    for each in generations:
        largest = "" if each.largest_difference is None else f"{each.largest_difference:.2g}"
        table.add_row(
            str(each.message),
            f"{each.start} to {each.end}",
            each.weight_version or "",
            each.verdict,
            largest,
            plain(each.reason or ""),
        )
    return table
