"""Options of a run: those of locust's command line, each of which an environment variable can give too, and shapes.

Values stay text in locust's own namespace, which the master sends to its workers and the web interface shows;
`load_options` reads them.

A shape says how many users there are at a time, of `--users` and within `--run-time`; `constant` is locust's own:

ramp    one more after the other until 80% of the time is over: at how many does latency turn?
spike   a fifth of the users, all of them for the fifth of the time in the middle: does it come back?
soak    all of them after 5% of the time, until the end: does throughput hold? The summary compares its quarters
"""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

SHAPES = ("constant", "ramp", "spike", "soak")
RAMP_PART = 0.8
SPIKE_BASE = 0.2
SPIKE_BEGINS, SPIKE_ENDS = 0.4, 0.6
SOAK_CLIMB = 0.05


def users_at(shape: str, elapsed: float, peak: int) -> int:
    """The users of `shape` when this part of the time is over; at least one, at most `peak`."""
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
"""Sessions have to be turned on at the service, and a pusher changes its policy: both are asked for by name."""
FIRST = "first"
"""In `--max-p95-s`: the time to the first finished rollout of a stream."""


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """What a run may be at worst; `None` and missing keys bound nothing."""

    max_error_rate: float = 0.01
    max_p95_s: Mapping[str, float] | None = None
    """By class, by `first`, or for all classes under `""`."""
    min_tokens_per_s: float | None = None
    min_turns_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """A run, as it was asked for."""

    classes: Mapping[str, int]
    """Shares of the users."""
    tasks: tuple[str, ...]
    """Empty: all that the service has."""
    long_tasks: tuple[str, ...]
    """Those of the multi-turn class; empty: `tasks`."""
    shape: str
    group_size: int
    batch_samples: int
    max_new_tokens: int
    max_turns: int
    long_turns: int
    agent_calls: int
    push_weights: str
    push_every_s: float
    limits: LoadLimits


def shares(text: str) -> dict[str, int]:
    """`interactive=3,groups` as shares; one that is not given is 1."""
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
    """`10` as a bound of all classes, `interactive=2,first=1` as bounds by class."""
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
    """A type of argparse that keeps the text, and refuses one that `read` cannot read, in its words."""

    def text_of(text: str) -> str:
        try:
            read(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from error
        return text

    return text_of


def add_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("Rollouts", "Who calls, with what, and what makes the run fail")

    def option(name: str, kind: Callable[[str], Any], default: object, text: str, **more: Any) -> None:
        variable = f"LOAD_{name.removeprefix('--').upper().replace('-', '_')}"
        # `env_var` is configargparse's, which locust's parser is of.
        group.add_argument(name, type=kind, default=default, help=text, env_var=variable, **more)

    option("--classes", checked(shares), DEFAULT_CLASSES, f"Classes of users with their shares: {', '.join(CLASSES)}")
    option("--tasks", str, "", "Tasks to play, by commas; by default all that GET /tasks lists")
    option("--long-tasks", str, "", "Tasks of the class multi-turn; by default those of --tasks")
    option("--shape", str, "constant", "How many users there are at a time", choices=SHAPES)
    option("--group-size", int, 8, "Rollouts of a sample in a batch of the class groups")
    option("--batch-samples", int, 4, "Samples in a request of the classes groups and streaming")
    option("--max-new-tokens", int, 32, "Longest generation, in tokens")
    option("--max-turns", int, 4, "Most turns of a rollout, but for the class multi-turn")
    option("--long-turns", int, 16, "Most turns of a rollout of the class multi-turn")
    option("--agent-calls", int, 3, "Calls of chat completions in a session of the class agent")
    option("--push-weights", str, "", "What the class pusher pushes: a .safetensors file or a folder of them")
    option("--push-every-s", float, 10.0, "Seconds between two pushes")
    option("--max-error-rate", float, 0.01, "Share of failed requests above which the exit code is 1")
    option("--max-p95-s", checked(p95_limits), "", "Longest p95: '10' for each class, or 'interactive=2,first=1'")
    option("--min-tokens-per-s", float, None, "Generated tokens a second below which the exit code is 1")
    option("--min-turns-per-s", float, None, "Turns a second below which the exit code is 1")


def load_options(given: Namespace) -> LoadOptions:
    return LoadOptions(
        classes=shares(given.classes),
        tasks=names(given.tasks),
        long_tasks=names(given.long_tasks),
        shape=given.shape,
        group_size=given.group_size,
        batch_samples=given.batch_samples,
        max_new_tokens=given.max_new_tokens,
        max_turns=given.max_turns,
        long_turns=given.long_turns,
        agent_calls=given.agent_calls,
        push_weights=given.push_weights,
        push_every_s=given.push_every_s,
        limits=LoadLimits(
            given.max_error_rate, p95_limits(given.max_p95_s), given.min_tokens_per_s, given.min_turns_per_s
        ),
    )
