"""What the loop tells of its rollouts to whoever measures or traces them. No I/O."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal

from rollout_client.contract import SampleResult

if TYPE_CHECKING:
    from service.rollouts.episode import Episode

Stage = Literal["rollout", "turn", "generate", "step", "agent"]
"""`rollout` holds turns; `turn` a generation, in one call of the generator or several, and a step; `agent`: a run."""
Work = Literal["queue", "tokenize", "encode"]
"""`queue`: a generation waits for its turn; `tokenize`: the prompts of a request become tokens; `encode`: a result
becomes a part of the response."""
NOTHING: AbstractContextManager[None] = nullcontext()


class RolloutObserver:
    """Ignores what it is told."""

    def during(self, stage: Stage, episode: "Episode") -> AbstractContextManager[object]:  # noqa: ARG002
        """Is entered while a stage of the episode runs; left with the exception that ends the stage, if one does."""
        return NOTHING

    def traceparent(self) -> str:
        """What is sent along with a call, so that its receiver traces below it; empty if this is not traced."""
        return ""

    def took(self, work: Work, seconds: float) -> None:
        """Such work has ended after so many seconds."""

    def ended(self, result: SampleResult, staleness: int | None) -> None:
        """A rollout has ended. `staleness`: how many versions its oldest token is behind, if that is known."""


UNOBSERVED = RolloutObserver()
