"""For authors of environments: the base class, the records, and tests without the service. Needs pydantic alone."""

from rollout_env.check import CheckFailed, check
from rollout_env.check_rules import Finding
from rollout_env.environment import TaskEnvironment
from rollout_env.errors import OutcomeInvalid, SampleRejected
from rollout_env.play import PlayResult, Sample, Turn, aplay, play
from rollout_env.records import ChatMessage, JsonObject, Role, StartOutcome, StepOutcome, StopString

__all__ = [
    "ChatMessage",
    "CheckFailed",
    "Finding",
    "JsonObject",
    "OutcomeInvalid",
    "PlayResult",
    "Role",
    "Sample",
    "SampleRejected",
    "StartOutcome",
    "StepOutcome",
    "StopString",
    "TaskEnvironment",
    "Turn",
    "aplay",
    "check",
    "play",
]
