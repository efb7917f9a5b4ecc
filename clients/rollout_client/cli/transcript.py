"""Rollouts on a terminal of 80 columns: tasks, transcripts, metrics, as rich renderables.

Text of models and environments is shown as it is: never read as markup, its control characters made visible.
"""

from typing import Any

from rich.console import Group
from rich.json import JSON
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rollout_client.cli.output import number, plain, value_table
from rollout_client.cli.run.totals import Totals
from rollout_client.contract.info import TaskInfo
from rollout_client.contract.messages import Message
from rollout_client.contract.rollouts import RequestMetrics, SampleResult
from rollout_client.results import is_clipped

STATUS_STYLES = {"completed": "green", "error": "red"}
CUT_STYLE = "yellow"
"""The style of every other status: something has cut the rollout off."""
ROLE_STYLES = {"assistant": "bold cyan", "environment": "magenta", "system": "dim", "tool": "magenta", "user": "bold"}
NOTE_STYLE = "dim"
LONGEST_ROLE = len("environment")
NAME_SHOWN = len("sha256:") + 8
"""Characters of an image's name; the whole name is in the rollout."""


def transcript(sample: SampleResult) -> Panel:
    """One rollout: its messages with their rewards, its status and its total reward."""
    style = STATUS_STYLES.get(sample.status, CUT_STYLE)
    title = plain(f"{sample.id or sample.idx} · {sample.task_name} · generation {sample.generation_index}")
    return Panel(
        _messages_grid(sample),
        title=title,
        title_align="left",
        subtitle=_outcome(sample, style),
        subtitle_align="right",
        border_style=style,
    )


def _messages_grid(sample: SampleResult) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0), expand=True)
    grid.add_column(width=LONGEST_ROLE)
    grid.add_column(ratio=1, overflow="fold")
    for message in sample.message_log:
        shown = "\n".join(filter(None, [*image_marks(message), message.content]))
        grid.add_row(Text(message.role, ROLE_STYLES[message.role]), plain(shown))
        if note := message_note(message):
            grid.add_row("", Text(note, NOTE_STYLE))
    if sample.error is not None:
        grid.add_row(Text("error", "bold red"), plain(f"{sample.error.kind}: {sample.error.message}", "red"))
    if sample.rollout_id is not None:
        grid.add_row(Text("rollout", NOTE_STYLE), plain(sample.rollout_id, NOTE_STYLE))
    return grid


def image_marks(message: Message) -> list[str]:
    """A short text for each image of a message: its name and how many tokens stand for it."""
    counts = [(shown.media[:NAME_SHOWN], shown.end - shown.start) for shown in message.mm_ranges or ()]
    return [f"[image {name}... · {count} {'token' if count == 1 else 'tokens'}]" for name, count in counts]


def message_note(message: Message) -> str:
    """Tokens, finish reason, log-probability and reward of a message; empty where it has none of them."""
    notes = []
    if message.generation_logprobs is not None:
        notes.append(f"{len(message.token_ids)} tokens")
    if message.finish_reason is not None:
        notes.append(message.finish_reason)
    if message.generation_logprobs:
        mean = sum(message.generation_logprobs) / len(message.generation_logprobs)
        notes.append(f"mean log-probability {mean:.3f}")
    if message.reward is not None:
        notes.append(f"reward {number(message.reward)}")
    return " · ".join(notes)


def _outcome(sample: SampleResult, style: str) -> Text:
    """Status and reward; a sample that failed has none. `clipped` are those whose last response its length has cut."""
    reward = "no reward" if sample.total_reward is None else f"reward {number(sample.total_reward)}"
    turns = sample.metrics.turn_count
    status = f"{sample.status}, clipped" if is_clipped(sample) else sample.status
    return Text(f"{status} · {reward} · {turns} {'turn' if turns == 1 else 'turns'}", f"bold {style}")


def metrics_table(metrics: RequestMetrics) -> Table:
    """The metrics of a request, a row each; histograms are left to programs."""
    parts = {name: value if isinstance(value, dict) else {"": value} for name, value in metrics.items()}
    flat = {f"{name}/{key}" if key else name: value for name, part in parts.items() for key, value in part.items()}
    rows = [(plain(name), number(value)) for name, value in flat.items() if not isinstance(value, list)]
    return value_table("Metrics", rows)


def totals_table(totals: Totals) -> Table:
    """How the rollouts of a run ended."""
    statuses = totals.statuses.most_common()
    return value_table(
        "Run",
        [
            ("rollouts", number(totals.rollouts)),
            *((plain(status, STATUS_STYLES.get(status, CUT_STYLE)), number(count)) for status, count in statuses),
            ("error rate", f"{totals.error_rate:.2%}"),
            ("mean reward", "" if totals.mean_reward is None else number(totals.mean_reward)),
            ("clipped ratio", "" if totals.clipped_ratio is None else f"{totals.clipped_ratio:.2%}"),
            ("tokens generated", number(totals.tokens)),
        ],
    )


def task_description(task: TaskInfo) -> Group:
    """A task: what it is, and what the `extra_env_info` of its samples holds."""
    return Group(Rule(Text(task.task_name, "bold cyan"), align="left"), plain(task.description), _fields_table(task))


def task_example(task: TaskInfo) -> JSON:
    """A sample that can be posted as it is; print it with `soft_wrap=True`, so that it can be copied too."""
    return JSON(task.example.model_dump_json(exclude_none=True, exclude_defaults=True))


def _fields_table(task: TaskInfo) -> Table:
    """A row for each field of a task's JSON schema."""
    fields: dict[str, Any] = task.fields
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, schema in fields.get("properties", {}).items():
        needed = "required" if name in fields.get("required", ()) else "optional"
        about = plain(schema.get("description", ""))
        table.add_row(plain(f"  {name}", "bold"), plain(type_name(schema)), Text(needed, NOTE_STYLE), about)
    return table


def type_name(schema: Any) -> str:
    """`integer`, `array of string`, `string or null`; `any` where a JSON schema does not say."""
    if choices := schema.get("anyOf"):
        return " or ".join(map(type_name, choices))
    name = str(schema.get("type", "any"))
    return f"{name} of {type_name(schema.get('items', {}))}" if name == "array" else name
