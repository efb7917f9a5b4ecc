"""`rollout export` and `replay`: stored rollouts as training data, and generated again."""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.table import Table

from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.cli.options import Connection, command
from rollout_client.cli.output import FAILED, AsJson, fact_table, number, plain, show, table, value_table
from rollout_client.contract.records import ReplayedGeneration, ReplayResponse
from rollout_client.contract.rollouts import SampleResult, SampleStatus
from rollout_client.data_out.export import Export, ExportFormat, ExportSelection, export_rollouts
from rollout_client.data_out.files import read_rollouts
from rollout_client.data_out.image_folder import image_file
from rollout_client.data_out.training_rows import Turns
from rollout_client.errors import error_of_problem
from rollout_client.results import FINAL_STATUSES

File = Annotated[Path | None, typer.Argument(help="Rollouts: .jsonl, .parquet, .json or .ndjson.")]
Job = Annotated[str | None, typer.Option(help="In place of FILE: a job of the service, once it has ended.")]


def _stored_rollouts(file: Path | None, job: str | None, service: Connection) -> Iterator[SampleResult]:
    """Raises `ValueError` unless one of `file` and `job` is given, and what reading it raises."""
    if (file is None) == (job is None):
        raise ValueError("Name a file of rollouts, or a job of the service with --job: one of both.")
    if job is not None:
        with service.client() as client:
            yield from _rollouts_of_job(client, job)
    elif file is not None:
        yield from read_rollouts(file)


def _rollouts_of_job(client: RolloutClient, job_id: str) -> Iterator[SampleResult]:
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
    statuses: Annotated[list[str] | None, typer.Option("--status", help="By default all with a final reward.")] = None,
    best_of_group: Annotated[bool, typer.Option("--best-of-group", help="Keep the best of each group.")] = False,
    min_reward: Annotated[float | None, typer.Option(help="Keep rollouts with this reward or a higher one.")] = None,
    min_gap: Annotated[float, typer.Option(min=0, help="dpo: least difference of the rewards of a pair.")] = 0.0,
    pairs_per_group: Annotated[int, typer.Option(min=1, help="dpo: maximum pairs of a group.")] = 1,
    turns: Annotated[Turns, typer.Option(help="Which responses of a rollout are trained.")] = "all",
    images: Annotated[Path | None, typer.Option(help="Write images to this folder; rows have their paths.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write stored rollouts as training data: messages, preference pairs, or tokens with labels.

    It says how many rollouts are in no row, and why.
    """
    if file is not None and output.resolve() == file.resolve():
        raise ValueError(f"{output} holds the rollouts: name another file for the rows.")
    if unknown := sorted({*(statuses or ())} - {*get_args(SampleStatus)}):
        raise typer.BadParameter(f"{unknown[0]} is not a status; there are {', '.join(get_args(SampleStatus))}")
    kept = cast(list[SampleStatus], statuses) or FINAL_STATUSES
    selection = ExportSelection(kept, best_of_group, min_reward, min_gap, pairs_per_group, turns)
    rollouts = _stored_rollouts(file, job, service)
    if images is None:
        exported = export_rollouts(rollouts, format, selection)
    else:
        with service.client() as client:
            exported = export_rollouts(rollouts, format, selection, partial(image_file, images, client.image))
    exported.save(output)
    counts = {name: getattr(exported, name) for name in ("format", "rollouts", "left_out", "notes")}
    show({**counts, "output": str(output), "rows": len(exported.rows)}, as_json, _export_table(exported))


def _export_table(exported: Export) -> Table:
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
    found = _stored_rollout(file, rollout)
    with service.client() as client:
        answer = client.replay(found)
    show(answer, as_json, _replay_facts(answer), _replayed_table(answer.generations))
    if answer.verdict in ("parts", "not_compared"):
        raise typer.Exit(FAILED)


def _stored_rollout(file: Path, name: str) -> SampleResult:
    """Raises `ValueError` if the file has no such rollout."""
    row = -1
    for row, sample in enumerate(read_rollouts(file)):
        if name in (sample.rollout_id, str(row)):
            return sample
    raise ValueError(f"{file} has no rollout {name}: name a rollout_id of it, or a row from 0 to {row}.")


def _replay_facts(answer: ReplayResponse) -> Table:
    facts = [("verdict", VERDICTS[answer.verdict]), ("tokens compared", number(answer.tokens))]
    if answer.largest_difference is not None:
        facts.append(("largest difference", f"{answer.largest_difference:.2g} of two log-probabilities"))
    if (found := answer.difference) is not None:
        facts.append(("at", f"message {found.message}, token {found.token}"))
        facts.append(("recorded", _token_text(found.recorded_id, found.recorded_text, found.recorded_logprob)))
        facts.append(("replayed", _token_text(found.replayed_id, found.replayed_text, found.replayed_logprob)))
    return fact_table([(name, plain(text)) for name, text in [*facts, *(("note", note) for note in answer.notes)]])


def _token_text(token: int | None, text: str | None, logprob: float | None) -> str:
    if token is None:
        return "the generation ended"
    probability = "unknown" if logprob is None else f"{math.exp(min(logprob, 0.0)):.4g}"
    return f"{token}{'' if text is None else f' {text!r}'}, probability {probability}"


def _replayed_table(generations: Iterable[ReplayedGeneration]) -> Table:
    rows = [
        (
            str(each.message),
            f"{each.start} to {each.end}",
            each.weight_version or "",
            each.verdict,
            "" if each.largest_difference is None else f"{each.largest_difference:.2g}",
            plain(each.reason or ""),
        )
        for each in generations
    ]
    return table("Generations", (">message", "tokens", "version", "verdict", ">largest difference", "why"), rows)
