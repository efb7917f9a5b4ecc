"""`rollout export` and `replay`: stored rollouts as training data, and generated again."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.table import Table

from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.cli.options import Connection, command
from rollout_client.cli.output import FAILED, AsJson, fact_table, number, plain, show, value_table
from rollout_client.contract.records import ReplayedGeneration, ReplayResponse, TokenDifference
from rollout_client.contract.rollouts import SampleResult, SampleStatus
from rollout_client.data_out.export import Export, ExportFormat, ExportSelection, export_rollouts
from rollout_client.data_out.files import read_rollouts
from rollout_client.data_out.image_folder import ImageFolder
from rollout_client.data_out.training_rows import Turns
from rollout_client.errors import error_of_problem
from rollout_client.results import FINAL_STATUSES

File = Annotated[
    Path | None,
    typer.Argument(help="Rollouts of `rollout run` or of `save`, or an answer: .jsonl, .parquet, .json, .ndjson."),
]
Job = Annotated[str | None, typer.Option(help="In place of FILE: a job of the service, once it has ended.")]


def stored_rollouts(file: Path | None, job: str | None, service: Connection) -> Iterator[SampleResult]:
    """Raises `ValueError` unless one of `file` and `job` is given, and what reading it raises."""
    if (file is None) == (job is None):
        raise ValueError("Name a file of rollouts, or a job of the service with --job: one of both.")
    if job is not None:
        with service.client() as client:
            yield from rollouts_of_job(client, job)
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
    format: Annotated[ExportFormat, typer.Option(help="What a row is: chat messages, a pair of them, or tokens.")],
    output: Annotated[Path, typer.Option(help="Where the rows are written: .jsonl.")],
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
    turns: Annotated[Turns, typer.Option(help="Which responses of a rollout are trained.")] = "all",
    images: Annotated[
        Path | None,
        typer.Option(
            help="A folder where the images that rollouts show are written, or are already. Rows have their paths; by "
            "default they have the names of images."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write stored rollouts as training data: messages, preference pairs, or tokens with labels.

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
    found = stored_rollout(file, rollout)
    with service.client() as client:
        answer = client.replay(found)
    show(answer, as_json, replay_facts(answer), replayed_table(answer.generations))
    if answer.verdict in ("parts", "not_compared"):
        raise typer.Exit(FAILED)


def stored_rollout(file: Path, name: str) -> SampleResult:
    """Raises `ValueError` if the file has no such rollout."""
    row = -1
    for row, sample in enumerate(read_rollouts(file)):
        if name in (sample.rollout_id, str(row)):
            return sample
    raise ValueError(f"{file} has no rollout {name}: name a rollout_id of it, or a row from 0 to {row}.")


def replay_facts(answer: ReplayResponse) -> Table:
    facts = [("verdict", VERDICTS[answer.verdict]), ("tokens compared", number(answer.tokens))]
    if answer.largest_difference is not None:
        facts.append(("largest difference", f"{answer.largest_difference:.2g} of two log-probabilities"))
    facts += [(name, text) for name, text in difference_facts(answer.difference)]
    return fact_table([(name, plain(text)) for name, text in [*facts, *(("note", note) for note in answer.notes)]])


def difference_facts(difference: TokenDifference | None) -> Iterator[tuple[str, str]]:
    if difference is None:
        return
    yield "at", f"message {difference.message}, token {difference.token}"
    for name, token, text, logprob in (
        ("recorded", difference.recorded_id, difference.recorded_text, difference.recorded_logprob),
        ("replayed", difference.replayed_id, difference.replayed_text, difference.replayed_logprob),
    ):
        shown = f"{token}" if text is None else f"{token} {text!r}"
        yield name, "the generation ended" if token is None else f"{shown}, probability {probability(logprob)}"


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
