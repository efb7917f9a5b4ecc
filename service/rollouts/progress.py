"""Ports to which the loop reports its rollouts: to measure or trace them, and to keep their progress. No I/O.

`RolloutObserver` is told of stages, work and ends. `ProgressLog`, which `JobJournal` (`service/jobs/journal.py`)
implements, keeps the `EpisodeState` of each turn, so that another process can continue a lost one's rollouts.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Literal, Protocol, TypeVar

from deployments.protocols.environments import StepRequest
from deployments.protocols.generation import GenerationRequest
from rollout_client.contract.rollouts import SampleInput, SampleResult
from service.rollouts.episode import Episode

Stage = Literal["rollout", "turn", "generate", "step", "agent"]
"""`rollout` holds turns; `turn` a generation, in one call of the generator or several, and a step; `agent`: a run."""
Work = Literal["queue", "tokenize", "encode"]
"""`queue`: a generation waits for its turn; `tokenize`: the prompts of a request become tokens; `encode`: a result
becomes a part of the response."""
NOTHING: AbstractContextManager[None] = nullcontext()


class RolloutObserver:
    """Ignores what it is told."""

    def during(self, stage: Stage, episode: Episode) -> AbstractContextManager[object]:  # noqa: ARG002
        """A context for a stage of the episode; left with the exception that ends the stage, if one does."""
        return NOTHING

    def traceparent(self) -> str:
        """The W3C trace context that a call carries to its receiver; empty if the rollout is not traced."""
        return ""

    def took(self, work: Work, seconds: float) -> None:
        """Records work that has ended after so many seconds."""

    def generated(self, weight: float, tokens: int) -> None:
        """Records the tokens of a generation that has ended; `weight` is that of its request's priority."""

    def recomputed(self, generator: str, tokens: int) -> None:
        """Records prompt tokens that a replica has computed although an earlier turn of the rollout had."""

    def ended(self, result: SampleResult, staleness: int | None) -> None:
        """Records the end of a rollout, once for each, when it is delivered.

        `staleness` is the age of its oldest token in versions, if that is known.
        """


UNOBSERVED = RolloutObserver()


class ProgressLog(Protocol):
    """Keeps the progress of one request.

    Guarantee: what `turn_ended` and `note_started` return for outlives this process.
    """

    @property
    def started(self) -> Mapping[int, SampleInput]:
        """The samples that were started before this process, by position in the request."""
        ...

    async def note_started(self, samples: Mapping[int, SampleInput]) -> None:
        """Records the samples with the additions of their environments' starts."""
        ...

    @property
    def begun_groups(self) -> int:
        """Up to which place in the request groups were begun before this process."""
        ...

    def was_delivered(self, episode: Episode) -> bool:
        """Whether a process before this one has delivered the episode's group, or dropped it before one that it has."""
        ...

    def restore(self, episodes: Iterable[Episode]) -> None:
        """Restores the episodes to their last recorded turns. Called once for each episode."""
        ...

    async def turn_ended(self, episode: Episode) -> None:
        """Records the turn. The next generation waits: after a loss of the process at most one turn is repeated."""
        ...

    def ended(self, episode: Episode, note: Callable[[], None]) -> None:
        """Records the end of an episode that was not delivered before, before it is yielded. Called once for each.

        `note` is called when its delivery outlives this process, so at most once for a rollout, whichever processes
        have played it.
        """
        ...


Call = TypeVar("Call", GenerationRequest, StepRequest)


def traced(request: Call, observer: RolloutObserver) -> Call:
    """The request with the span that is current; the request itself if that is not traced."""
    traceparent = observer.traceparent()
    return replace(request, traceparent=traceparent) if traceparent else request
