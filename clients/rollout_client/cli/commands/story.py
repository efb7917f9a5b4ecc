"""`rollout story`: what happened to one rollout that has ended, from the record that the service keeps of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rollout_client.cli.options import Connection, command
from rollout_client.cli.output import AsJson, fact_table, number, plain, show
from rollout_client.cli.transcript import transcript
from rollout_client.contract.records import RecordedGeneration, RolloutRecord


@command
def story(
    service: Connection,
    rollout_id: Annotated[str, typer.Argument(help="The `rollout_id` of a result, as `rollout view` shows it.")],
    as_json: AsJson = False,
) -> None:
    """Show what happened to a rollout: its transcript, queue, replicas, retries, and times by turn.

    The service keeps records for a bounded time, where its config has `rollout_records`.
    """
    with service.client() as client:
        record = client.rollout_record(rollout_id)
    show(record, as_json, transcript(record.rollout), story_facts(record), *timeline(record))


def story_facts(record: RolloutRecord) -> Table:
    facts: list[tuple[str, str]] = [
        ("request", record.request_id),
        ("policy", record.policy or "the one without a name"),
        ("priority", record.priority or "unknown"),
        ("ended", moment(record.ended_at)),
    ]
    if record.began_at is not None:
        facts.append(("took", duration(record.ended_at - record.began_at)))
    facts += [
        ("in the queue", duration(sum(made.waited_s for made in record.generations))),
        ("in engines", duration(sum(made.took_s for made in record.generations))),
        ("in steps", duration(sum(step.took_s for step in record.steps))),
        ("retries", f"{len(record.retries)}, {record.retries_used} of the request's; {record.restarts} times anew"),
    ]
    if (mismatch := record.mismatch) is not None:
        ratios = f"mean ratio {mismatch.mean_ratio:.3f}, {mismatch.share_beyond:.1%} beyond 10"
        largest = f"largest {mismatch.largest_ratio:.3f}"
        facts.append(("trainer", f"{ratios}, {largest}, of {number(mismatch.tokens)} tokens"))
    return fact_table([(name, plain(fact)) for name, fact in facts])


@dataclass(frozen=True, slots=True)
class StoryEvent:
    """A generation, a step of the environment, or a retry. Times are in seconds."""

    kind: str
    turn: int | None
    """From 0; `None` for a retry."""
    at: float | None
    """Since 1970; `None` if it is not known."""
    took_s: float | None = None
    made: RecordedGeneration | None = None
    note: str = ""


def events_of(record: RolloutRecord) -> list[StoryEvent]:
    """Generations, steps and retries in order: each step after its turn, each retry before what came after it."""
    turns = turns_of(record)
    events = [
        StoryEvent("generation", turns.get(made.message), made.began_at, made.took_s, made)
        for made in record.generations
    ]
    for step in record.steps:
        place = sum(event.turn is not None and event.turn <= step.turn for event in events)
        events.insert(place, StoryEvent("step", step.turn, step.began_at, step.took_s))
    for retry in record.retries:
        after = (place for place, event in enumerate(events) if event.at is not None and event.at > retry.at)
        note = f"{retry.kind}: {retry.message}"
        events.insert(next(after, len(events)), StoryEvent("retry", None, retry.at, note=note))
    return events


def turns_of(record: RolloutRecord) -> dict[int, int]:
    """The number of the turn of each generated message, by its index."""
    numbers = count()
    log = record.rollout.message_log
    return {place: next(numbers) for place, message in enumerate(log) if message.generation_logprobs is not None}


def timeline(record: RolloutRecord) -> Iterator[RenderableType]:
    """A row for each event; nothing if none is known."""
    events = events_of(record)
    if not events:
        return
    table = Table(title="Timeline", title_justify="left")
    for name in ("turn", "what", "after", "waited", "took", "tokens", "replica", "cached", "batch", "weights", "note"):
        is_text = name in ("what", "replica", "weights", "note")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for event in events:
        after = "" if event.at is None or record.began_at is None else duration(max(0.0, event.at - record.began_at))
        took = "" if event.took_s is None else duration(event.took_s)
        turn = "" if event.turn is None else str(event.turn + 1)
        waited, *of_made = generation_cells(event.made, record)
        note = plain(event.note, "yellow")
        table.add_row(turn, event.kind, after, waited, took, *of_made, note)
    yield table


def generation_cells(made: RecordedGeneration | None, record: RolloutRecord) -> list[str | Text]:
    """The wait, tokens, replica, cached tokens, batch and versions of a generation."""
    if made is None:
        return [""] * 6
    spans = record.rollout.message_log[made.message].weight_versions or ()
    versions = dict.fromkeys(span.version for span in spans if span.start < made.end and made.start < span.end)
    return [
        duration(made.waited_s),
        number(made.end - made.start),
        plain(made.replica or "unknown"),
        number(made.cached_tokens),
        number(made.batch_size) if made.batch_size else "",
        plain(", ".join(versions)),
    ]


def duration(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:,.2f} s"


def moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="seconds")
