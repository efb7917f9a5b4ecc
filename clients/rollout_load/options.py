"""Options of a run, from locust's command line or environment variables, and shapes.

Values stay text in locust's own namespace, which the master sends to its workers and the web interface shows;
`load_options` reads them.

A shape says how many users there are at a time, of `--users` and within `--run-time`; `constant` is locust's own:

ramp    one more after the other until 80% of the time is over: at how many does latency turn?
spike   a fifth of the users, all of them for the fifth of the time in the middle: does it come back?
soak    all of them after 5% of the time, until the end: does throughput hold? The summary compares its quarters
"""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from math import ceil
from typing import Any

SHAPES = ("constant", "ramp", "spike", "soak")
RAMP_PART = 0.8
SPIKE_BASE = 0.2
SPIKE_BEGINS, SPIKE_ENDS = 0.4, 0.6
SOAK_CLIMB = 0.05


def users_at(shape: str, elapsed: float, peak: int) -> int:
    """Users of `shape` when this part of the time is over; at least one, at most `peak`."""
    if shape == "ramp":
        wanted = ceil(peak * elapsed / RAMP_PART)
    elif shape == "spike":
        wanted = peak if SPIKE_BEGINS <= elapsed < SPIKE_ENDS else ceil(peak * SPIKE_BASE)
    elif shape == "soak":
        wanted = ceil(peak * elapsed / SOAK_CLIMB)
    else:
        wanted = peak
    return min(max(wanted, 1), peak)


DEFAULT_HOST = "http://127.0.0.1:8000"
CLASSES = ("interactive", "groups", "multi-turn", "streaming", "agent", "pusher")
DEFAULT_CLASSES = "interactive=3,groups=1,multi-turn=1,streaming=1"
"""Agents need sessions, which the service may have turned off, and a pusher changes its policy."""
FIRST = "first"
"""Key of `--max-p95-s` for the time to the first finished rollout of a stream."""


def shares(text: str) -> dict[str, int]:
    """Shares by class, from `interactive=3,groups`; the default share is 1."""
    given = {}
    for part in names(text):
        name, _, share = part.partition("=")
        if name not in CLASSES:
            raise ValueError(f"there is no class {name!r}; the classes are {', '.join(CLASSES)}")
        if not (share or "1").isdecimal() or not int(share or 1):
            raise ValueError(f"the share of {name} is {share!r}; give a number from 1")
        given[name] = int(share or 1)
    if not given:
        raise ValueError(f"no class is named; the classes are {', '.join(CLASSES)}")
    return given


def p95_limits(text: str) -> dict[str, float]:
    """Bounds in seconds: `10` for all classes, `interactive=2,first=1` by class."""
    bounds = {}
    for part in names(text):
        name, _, seconds = part.rpartition("=")
        if name not in ("", FIRST, *CLASSES):
            raise ValueError(f"there is no class {name!r}; bounds are of {', '.join((FIRST, *CLASSES))}")
        bounds[name] = float(seconds)
    return bounds


def names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def checked(read: Callable[[str], Any]) -> Callable[[str], str]:
    """An argparse type that keeps the text, and rejects one that `read` cannot read, with the message of `read`."""

    def text_of(text: str) -> str:
        try:
            read(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from error
        return text

    return text_of


def option(default: Any, text: str, read: Callable[[str], Any] | None = None, **more: Any) -> Any:
    """A field that is an option of the command line.

    Args:
        read: makes the value of the text; by default the value is that of argparse.
    """
    kind = checked(read) if read else float if default is None else type(default)
    argument = {"default": default, "help": text, "type": kind, **more}
    value_of = read or (lambda value: value)
    return field(default_factory=lambda: value_of(default), metadata={"argument": argument, "value_of": value_of})


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Bounds that a run must keep; `None` and missing keys bound nothing."""

    max_error_rate: float = option(0.01, "Share of failed requests above which the exit code is 1")
    max_p95_s: Mapping[str, float] = option(
        "", "Longest p95: '10' for each class, or 'interactive=2,first=1'", p95_limits
    )
    min_tokens_per_s: float | None = option(None, "Generated tokens a second below which the exit code is 1")
    min_turns_per_s: float | None = option(None, "Turns a second below which the exit code is 1")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of a run."""

    classes: Mapping[str, int] = option(
        DEFAULT_CLASSES, f"Classes of users with their shares: {', '.join(CLASSES)}", shares
    )
    tasks: tuple[str, ...] = option("", "Tasks to play, by commas; by default all that GET /tasks lists", names)
    long_tasks: tuple[str, ...] = option("", "Tasks of the class multi-turn; by default those of --tasks", names)
    shape: str = option("constant", "How many users there are at a time", choices=SHAPES)
    group_size: int = option(8, "Rollouts of a sample in a batch of the class groups")
    batch_samples: int = option(4, "Samples in a request of the classes groups and streaming")
    max_new_tokens: int = option(32, "Longest generation, in tokens")
    max_turns: int = option(4, "Most turns of a rollout, but for the class multi-turn")
    long_turns: int = option(16, "Most turns of a rollout of the class multi-turn")
    agent_calls: int = option(3, "Calls of chat completions in a session of the class agent")
    push_weights: str = option("", "What the class pusher pushes: a .safetensors file or a folder of them")
    push_every_s: float = option(10.0, "Seconds between two pushes")
    limits: LoadLimits = field(default_factory=LoadLimits)


def options_in(record: type) -> dict[str, Mapping[str, Any]]:
    """Metadata of the fields of `record` that are options, by name."""
    return {each.name: each.metadata for each in fields(record) if each.metadata}


def add_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("Rollouts", "Who calls, with what, and what makes the run fail")
    for name, metadata in {**options_in(LoadOptions), **options_in(LoadLimits)}.items():
        # `env_var` belongs to configargparse, from which locust takes its parser.
        group.add_argument(f"--{name.replace('_', '-')}", env_var=f"LOAD_{name.upper()}", **metadata["argument"])


def load_options(given: Namespace) -> LoadOptions:
    def values(record: type) -> dict[str, Any]:
        return {name: each["value_of"](getattr(given, name)) for name, each in options_in(record).items()}

    return LoadOptions(**values(LoadOptions), limits=LoadLimits(**values(LoadLimits)))
