"""Client of the rollout service. Light to import: a name is loaded when it is first used, and needs httpx and pydantic.

Beside these names users import from `rollout_client.contract`, `tensors`, `weights`, `data_out`, `trainers`, `results`
and `errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollout_client.version import __version__

if TYPE_CHECKING:
    from rollout_client.agent_runner import AgentRollout as AgentRollout
    from rollout_client.agent_runner import play_agent as play_agent
    from rollout_client.calls.async_client.client import AsyncRolloutClient as AsyncRolloutClient
    from rollout_client.calls.async_client.pusher import AsyncPolicyPusher as AsyncPolicyPusher
    from rollout_client.calls.async_client.rollouts import AsyncRolloutStream as AsyncRolloutStream
    from rollout_client.calls.sync_client.client import RolloutClient as RolloutClient
    from rollout_client.calls.sync_client.pusher import PolicyPusher as PolicyPusher
    from rollout_client.calls.sync_client.rollouts import RolloutStream as RolloutStream
    from rollout_client.contract.info import ServiceInfo as ServiceInfo
    from rollout_client.contract.messages import Message as Message
    from rollout_client.contract.policy import PolicyState as PolicyState
    from rollout_client.contract.policy import PushResult as PushResult
    from rollout_client.contract.rollouts import Keep as Keep
    from rollout_client.contract.rollouts import RolloutRequest as RolloutRequest
    from rollout_client.contract.rollouts import SampleInput as SampleInput
    from rollout_client.contract.rollouts import SampleResult as SampleResult
    from rollout_client.contract.rollouts import Sampling as Sampling
    from rollout_client.data_out.files import read_rollouts as read_rollouts
    from rollout_client.errors import RequestRejected as RequestRejected
    from rollout_client.errors import RolloutError as RolloutError
    from rollout_client.errors import RolloutTimeout as RolloutTimeout
    from rollout_client.errors import ServiceFailed as ServiceFailed
    from rollout_client.errors import ServiceUnreachable as ServiceUnreachable
    from rollout_client.errors import StreamBroken as StreamBroken
    from rollout_client.responses import RolloutResponse as RolloutResponse
    from rollout_client.results import resumed as resumed

_HOMES = {
    "agent_runner": "AgentRollout play_agent",
    "calls.async_client.client": "AsyncRolloutClient",
    "calls.async_client.pusher": "AsyncPolicyPusher",
    "calls.async_client.rollouts": "AsyncRolloutStream",
    "calls.sync_client.client": "RolloutClient",
    "calls.sync_client.pusher": "PolicyPusher",
    "calls.sync_client.rollouts": "RolloutStream",
    "contract.info": "ServiceInfo",
    "contract.messages": "Message",
    "contract.policy": "PolicyState PushResult",
    "contract.rollouts": "Keep RolloutRequest SampleInput SampleResult Sampling",
    "data_out.files": "read_rollouts",
    "errors": "RequestRejected RolloutError RolloutTimeout ServiceFailed ServiceUnreachable StreamBroken",
    "responses": "RolloutResponse",
    "results": "resumed",
}
"""The modules of the names that are loaded when they are first used."""
__all__ = ["__version__", *(name for names in _HOMES.values() for name in names.split())]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
