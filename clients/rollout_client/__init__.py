"""Client of the rollout service. Light to import: httpx, pydantic and tenacity, nothing heavier."""

from rollout_client.agent_runner import AgentRollout, agent_rollouts, play_agent
from rollout_client.async_client.stream import AsyncRolloutStream
from rollout_client.calls.async_client.client import AsyncRolloutClient
from rollout_client.calls.async_client.pusher import AsyncPolicyPusher
from rollout_client.calls.options import CallOptions, ClientOptions
from rollout_client.calls.policy import UpdateOptions
from rollout_client.calls.rollouts import RolloutOptions
from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.calls.sync_client.pusher import PolicyPusher
from rollout_client.contract.info import ServiceInfo
from rollout_client.contract.policy import PolicyLayout, PolicyState, PolicyUpdate, PushResult
from rollout_client.contract.problems import FieldProblem, Problem
from rollout_client.contract.rollouts import (
    GivenMessage,
    Keep,
    Message,
    PolicyVersions,
    PromptMessage,
    RolloutDemand,
    RolloutRequest,
    RolloutResponse,
    RolloutSummary,
    SampleError,
    SampleInput,
    SampleMetrics,
    SampleResult,
    Sampling,
    WeightVersionSpan,
)
from rollout_client.contract.scores import ScoreRequest, ScoreResponse, SequenceScore
from rollout_client.data_out.files import read_rollouts
from rollout_client.data_out.trackers import NoActiveRun, log_rollouts
from rollout_client.errors import (
    ContractDiffers,
    RequestRejected,
    ResponseNotUnderstood,
    RolloutError,
    RolloutTimeout,
    ServiceFailed,
    ServiceUnreachable,
    StatusError,
    StreamBroken,
    TokenizerDiffers,
    UploadLost,
    WeightsDiffer,
)
from rollout_client.resume import resumed
from rollout_client.score_calls import ScoreOptions
from rollout_client.staleness import Staleness, staleness
from rollout_client.sync_client.stream import RolloutStream
from rollout_client.task_contract import TaskInfo
from rollout_client.version import __version__
from rollout_client.weights.layout import WeightsDoNotFit
from rollout_client.weights.safetensors_file import NotSafetensors

__all__ = [
    "AgentRollout",
    "AsyncPolicyPusher",
    "AsyncRolloutClient",
    "AsyncRolloutStream",
    "CallOptions",
    "ClientOptions",
    "ContractDiffers",
    "FieldProblem",
    "GivenMessage",
    "Keep",
    "Message",
    "NoActiveRun",
    "NotSafetensors",
    "PolicyLayout",
    "PolicyPusher",
    "PolicyState",
    "PolicyUpdate",
    "PolicyVersions",
    "Problem",
    "PromptMessage",
    "PushResult",
    "RequestRejected",
    "ResponseNotUnderstood",
    "RolloutClient",
    "RolloutDemand",
    "RolloutError",
    "RolloutOptions",
    "RolloutRequest",
    "RolloutResponse",
    "RolloutStream",
    "RolloutSummary",
    "RolloutTimeout",
    "SampleError",
    "SampleInput",
    "SampleMetrics",
    "SampleResult",
    "Sampling",
    "ScoreOptions",
    "ScoreRequest",
    "ScoreResponse",
    "SequenceScore",
    "ServiceFailed",
    "ServiceInfo",
    "ServiceUnreachable",
    "Staleness",
    "StatusError",
    "StreamBroken",
    "TaskInfo",
    "TokenizerDiffers",
    "UpdateOptions",
    "UploadLost",
    "WeightVersionSpan",
    "WeightsDiffer",
    "WeightsDoNotFit",
    "__version__",
    "agent_rollouts",
    "log_rollouts",
    "play_agent",
    "read_rollouts",
    "resumed",
    "staleness",
]
