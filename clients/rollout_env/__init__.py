"""For authors of environments: the base class, the records, and tests without the service. Needs pydantic alone."""

from rollout_env.check import CheckFailed, Finding, check
from rollout_env.environment import LostSession, Session, TaskEnvironment
from rollout_env.models import (
    ChatModel,
    ModelRefused,
    ModelReply,
    ModelUnavailable,
    RewardModel,
    ScriptedChatModel,
    ScriptedRewardModel,
    escape_control_tokens,
    json_data,
)
from rollout_env.play import PlayResult, Reply, Sample, Turn, aplay, play
from rollout_env.records import (
    ChatMessage,
    JsonObject,
    OutcomeInvalid,
    Role,
    SampleRejected,
    StartOutcome,
    StepOutcome,
    StopString,
    TemporaryFailure,
)
from rollout_env.tool_calls import AnyCall, MalformedCall, ToolCall, reply_text, tool_calls_of
from rollout_env.users import ModelUser, SimulatedUser, UserScenario, UserTurn, UserTurnMissing

__all__ = [
    "AnyCall",
    "ChatMessage",
    "ChatModel",
    "CheckFailed",
    "Finding",
    "JsonObject",
    "LostSession",
    "MalformedCall",
    "ModelRefused",
    "ModelReply",
    "ModelUnavailable",
    "ModelUser",
    "OutcomeInvalid",
    "PlayResult",
    "Reply",
    "RewardModel",
    "Role",
    "Sample",
    "SampleRejected",
    "ScriptedChatModel",
    "ScriptedRewardModel",
    "Session",
    "SimulatedUser",
    "StartOutcome",
    "StepOutcome",
    "StopString",
    "TaskEnvironment",
    "TemporaryFailure",
    "ToolCall",
    "Turn",
    "UserScenario",
    "UserTurn",
    "UserTurnMissing",
    "aplay",
    "check",
    "escape_control_tokens",
    "json_data",
    "play",
    "reply_text",
    "tool_calls_of",
]
