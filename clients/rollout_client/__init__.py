"""Client of the rollout service. Light to import: httpx, pydantic and tenacity, nothing heavier."""

from rollout_client.agent_runner import AgentRollout, agent_rollouts, play_agent
from rollout_client.calls.async_client.client import AsyncRolloutClient
from rollout_client.calls.async_client.pusher import AsyncPolicyPusher
from rollout_client.calls.async_client.rollouts import AsyncRolloutStream
from rollout_client.calls.options import CallOptions, ClientOptions
from rollout_client.calls.policy import UpdateOptions
from rollout_client.calls.rollouts import RolloutOptions, ScoreOptions
from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.calls.sync_client.pusher import PolicyPusher
from rollout_client.calls.sync_client.rollouts import RolloutStream
from rollout_client.contract.base import FieldProblem, Problem, RolloutDemand
from rollout_client.contract.info import ScoreRequest, ScoreResponse, SequenceScore, ServiceInfo, TaskInfo
from rollout_client.contract.jobs import JobCursor, JobEvent, JobStatus
from rollout_client.contract.messages import GivenMessage, Message, PromptMessage, WeightVersionSpan
from rollout_client.contract.policy import PolicyLayout, PolicyState, PolicyUpdate, PushResult
from rollout_client.contract.rollouts import (
    Keep,
    PolicyVersions,
    RolloutRequest,
    RolloutSummary,
    SampleError,
    SampleInput,
    SampleMetrics,
    SampleResult,
    Sampling,
)
from rollout_client.contract.selection import SampleRange
from rollout_client.data_out.export import Export, ExportSelection, NothingToExport, export_rollouts
from rollout_client.data_out.files import read_rollouts
from rollout_client.errors import (
    ContractDiffers,
    NotJson,
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
from rollout_client.responses import PlayedRollouts as RolloutResponse
from rollout_client.results import Staleness, resumed, seats_of, staleness
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
    "Export",
    "ExportSelection",
    "FieldProblem",
    "GivenMessage",
    "JobCursor",
    "JobEvent",
    "JobStatus",
    "Keep",
    "Message",
    "NotJson",
    "NotSafetensors",
    "NothingToExport",
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
    "SampleRange",
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
    "export_rollouts",
    "play_agent",
    "read_rollouts",
    "resumed",
    "seats_of",
    "staleness",
]
