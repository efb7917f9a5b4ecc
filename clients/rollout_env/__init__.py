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
from rollout_env.play import PlayResult, aplay, play
from rollout_env.records import (
    ChatMessage,
    JsonObject,
    OutcomeInvalid,
    SampleRejected,
    StartOutcome,
    StepOutcome,
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
    "RewardModel",
    "SampleRejected",
    "ScriptedChatModel",
    "ScriptedRewardModel",
    "Session",
    "SimulatedUser",
    "StartOutcome",
    "StepOutcome",
    "TaskEnvironment",
    "TemporaryFailure",
    "ToolCall",
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
