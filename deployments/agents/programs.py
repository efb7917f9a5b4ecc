"""The ways to run an agent, and what they have in common: what a run gets, what it answers, how it fails."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, FiniteFloat, JsonValue, TypeAdapter, ValidationError

from deployments.failures import AgentFailed

MOST_SHOWN = 2000
"""Characters of what an agent has written that its failure shows."""
REWARD: TypeAdapter[float | dict[str, float] | None] = TypeAdapter(FiniteFloat | dict[str, FiniteFloat] | None)


class AgentCall(BaseModel):
    """What one run gets."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    base_url: str
    """Of its session. OpenAI's clients take it with `/v1` at its end, Anthropic's without."""
    api_key: str
    sample: dict[str, JsonValue]
    """As it was posted, with `task_name` and `idx`."""


@dataclass(slots=True)
class LastSaid:
    """What one run has said last, for whoever ends it."""

    sentence: str = ""


class AgentProgram(Protocol):
    """Runs an agent. Runs share nothing and may overlap."""

    async def run(self, call: AgentCall, said: LastSaid) -> dict[str, float]:
        """Returns when the run has ended: its reward by names, empty if it gives none.

        Cancelling the call ends the run, within a second.

        Args:
            said: is kept current.

        Raises:
            AgentFailed: it failed. The message has what it said last.
            EnvironmentLost: it cannot be run just now.
        """
        ...


def reward_of(given: Any, what: str) -> dict[str, float]:
    """The reward that an agent has given, by names.

    Args:
        what: the subject of the failure's message.

    Raises:
        AgentFailed: it is no reward.
    """
    try:
        reward = REWARD.validate_python(given, strict=True)
    except ValidationError as error:
        raise AgentFailed(
            f"{what} is no reward: it must be a finite number, an object of named ones, or null, got {shown(given)}."
        ) from error
    if reward is None:
        return {}
    return dict(reward) if isinstance(reward, Mapping) else {"reward": float(reward)}


def shown(value: Any) -> str:
    """The beginning of a value."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def last_of(text: str) -> str:
    """The end of what an agent has written."""
    text = text.strip()
    return text if len(text) <= MOST_SHOWN else f"...{text[-MOST_SHOWN:]}"
