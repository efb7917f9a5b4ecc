"""The records of environment steps and of tasks. Imported through `deployments/protocols/generation.py`."""

from dataclasses import dataclass, field
from typing import Any

from rollout_env import ChatMessage


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One environment step: the messages so far, and the `extra_env_info` of the sample or of the step before."""

    message_log: list[ChatMessage]
    extra_env_info: dict[str, Any]
    request_id: str = ""
    """The request of the rollout. This field and the next two are for logs."""
    rollout_id: str = ""
    """The rollout of which this is one step."""
    sample: int | None = None
    """The sample's number as the caller sees it."""
    step_id: str = ""
    """Unique among all steps that run; a retry has the id of the step that it repeats."""
    is_start: bool = False
    """Asks for the start of a sample in place of a step: the message log is its prompt, maybe empty."""
    lockstep_id: str = ""
    """The request of the step if it is played in lockstep: the steps of one turn go to one replica. Else empty."""
    session_id: str = ""
    """The playing of the rollout, which has one session if its environment has any. A rollout that is played anew has
    another one."""
    turn: int = 0
    """How many steps the rollout had before this one, those of a message log that was posted included."""
    first_turn: int = 0
    """How many of these steps the message log had that was posted."""
    traceparent: str = ""
    """The span of the step, as the header of the W3C; empty if it is not traced."""
    owner: str | None = None
    """The name of the key of the rollout, which owns the images that the step shows; None where none is needed."""


@dataclass(frozen=True, slots=True)
class TaskDescription:
    """An environment as `/tasks` shows it. `fields` is the JSON schema of its `extra_env_info`."""

    task_name: str
    description: str
    fields: dict[str, Any]
    example: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas of functions, for the chat template."""
    has_start: bool = False
    """Whether its samples must be started before they are played."""
    has_sessions: bool = False
    """Whether all steps of a rollout must go to one replica."""
    forks_sessions: bool = False
    """Whether it opens a session that stands at a later turn than the first."""
    sample_count: int | None = None
    """How many different samples it has; None where it makes them without end."""
    certificate: str | None = None
    """The hash of its certificate; None without one."""


@dataclass(frozen=True, slots=True)
class RefusedField:
    """A field of a sample's `extra_env_info` that its environment does not accept."""

    place: int
    """Index of the sample among those that were checked."""
    location: tuple[str | int, ...]
    """The path of the field; empty for the whole of `extra_env_info`."""
    message: str
    """The error, without a final full stop."""
