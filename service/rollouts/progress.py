"""What of an episode outlives its process, so that another one can go on with it. No I/O.

Both halves of the interface between the loop and what keeps its progress: `EpisodeState`, and `ProgressLog`, which
`JobJournal` (`service/jobs/journal.py`) implements.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pydantic import JsonValue

from rollout_client.contract import Message, SampleError, SampleInput, SampleStatus

if TYPE_CHECKING:
    from service.rollouts.episode import Episode


@dataclass(frozen=True, slots=True)
class MetricCounts:
    """What `SampleMetricsAccumulator` has counted. Lengths are in tokens."""

    turn_input_tokens: list[int] = field(default_factory=list)
    turn_gen_tokens: list[int] = field(default_factory=list)
    env_tokens: int = 0
    parse_errors: int = 0
    environment: dict[str, float] = field(default_factory=dict)
    clipped_turns: int = 0
    tokens_by_replica: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpisodeState:
    """One episode at the end of a turn."""

    messages: list[Message]
    """Those after the prompt's, from some index on."""
    extra_env_info: dict[str, JsonValue]
    stop_strings: tuple[str, ...]
    rewards: dict[str, float]
    answer: str | None
    metrics: MetricCounts
    terminated: bool
    truncated: bool
    steps: int
    restarts: int
    retries_left: int
    status: SampleStatus | None
    error: SampleError | None
    staleness: int | None
    """At its end, in versions; `None` before it, or if it is not known."""


class ProgressLog(Protocol):
    """Keeps the progress of one request.

    Guarantee: what `turn_ended` and `note_started` return for outlives this process.
    """

    @property
    def started(self) -> Mapping[int, SampleInput]:
        """The samples that were started before this process, by position in the request."""
        ...

    async def note_started(self, samples: Mapping[int, SampleInput]) -> None:
        """These samples have got what their environments' starts add."""
        ...

    def restore(self, episodes: Iterable["Episode"]) -> None:
        """Brings the episodes to where they were."""
        ...

    async def turn_ended(self, episode: "Episode") -> None:
        """The next generation waits for this: after a loss of the process at most one turn is generated again."""
        ...

    def ended(self, episode: "Episode") -> None:
        """The episode is about to be yielded as a result. Called once for each."""
        ...
