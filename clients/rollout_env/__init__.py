"""For authors of environments: the base class, the records, and tests without the service. Needs pydantic alone."""

from rollout_env.environment import TaskEnvironment
from rollout_env.errors import OutcomeInvalid, SampleRejected
from rollout_env.records import ChatMessage, JsonObject, Role, StepOutcome, StopString

__all__ = [
    "ChatMessage",
    "JsonObject",
    "OutcomeInvalid",
    "Role",
    "SampleRejected",
    "StepOutcome",
    "StopString",
    "TaskEnvironment",
]
