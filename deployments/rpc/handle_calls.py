"""Calls of other deployments over Serve handles: which replicas take them, and what breaks one as a `RolloutFailure`.

`NamedReplicaRouter` records the replicas; `RemoteGenerator` and `RemoteEnvironment` read them. The record must not be
in the router's module, because Serve copies that module with its global variables into the process that routes.

A client of a store has its methods, and its type, whose module only type checkers import: it loads the store's
databases or weights.
"""

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from grpc import RpcError
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.failures import JobStoreLost, PolicyStoreLost, RolloutFailure, RolloutRecordsLost
from deployments.upstream.ray_serve.serve_internals import cancel_call

_live_replicas: dict[Any, tuple[str, ...]] = {}


def record_live_replicas(deployment_id: Any, unique_ids: Iterable[str]) -> None:
    _live_replicas[deployment_id] = tuple(sorted(unique_ids))


def live_replicas_of(handle: DeploymentHandle[Any]) -> tuple[str, ...]:
    """Unique ids of the deployment's replicas that take calls, sorted. Empty before the handle's first call."""
    return _live_replicas.get(handle.deployment_id, ())


logger = logging.getLogger("rollout_service.rpc")


async def call_result(awaited: Awaitable[Any], call: Any, lost: type[RolloutFailure], who: str) -> Any:
    """Awaits a result of a handle call. Cancelling this cancels the call.

    Args:
        awaited: what the result comes from: the call itself, or the next item of a streaming call.
        lost: the failure to raise when the replica or the connection to it breaks.
        who: the subject of its message.

    Raises:
        RolloutFailure: `lost`; its cause is what Ray raised. What that says stays in the log: it holds addresses.
        Exception: what the replica raised, as it raised it.
    """
    try:
        return await awaited
    except asyncio.CancelledError:
        # Serve's default transport does not cancel a call whose awaiting task is cancelled.
        cancel_call(call)
        raise
    except RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise lost(f"{who} gave the call up.") from error
    except RayActorError as error:
        raise lost(f"{who} died during the call.") from error
    except (RayError, RayServeException, RpcError) as error:
        logger.warning("%s could not be reached.", who, extra={"cause": repr(error)})
        raise lost(f"{who} could not be reached.") from error


if TYPE_CHECKING:
    from deployments.jobs.store import JobStore
    from deployments.policy.store import PolicyStore
    from deployments.rollout_records.store import RolloutRecordStore


class StoreClient:
    """Raises what the store raises, and `lost` if it dies or cannot be reached."""

    def __init__(self, handle: DeploymentHandle[Any], lost: type[RolloutFailure], who: str) -> None:
        self._handle = handle
        self._lost = lost
        self._who = who

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._call, method)

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        response: Any = getattr(self._handle, method).remote(*arguments, **named)
        return await call_result(response, response, self._lost, self._who)


def policy_store_client(handle: DeploymentHandle[Any]) -> "PolicyStore":
    """Raises `PolicyStoreLost` if the store dies or cannot be reached."""
    return cast("PolicyStore", StoreClient(handle, PolicyStoreLost, "The policy store"))


def job_store_client(handle: DeploymentHandle[Any]) -> "JobStore":
    """Raises `JobStoreLost` if the store dies or cannot be reached."""
    return cast("JobStore", StoreClient(handle, JobStoreLost, "The job store"))


def rollout_record_store_client(handle: DeploymentHandle[Any]) -> "RolloutRecordStore":
    """Raises `RolloutRecordsLost` if the store dies or cannot be reached."""
    return cast("RolloutRecordStore", StoreClient(handle, RolloutRecordsLost, "The store of the records of rollouts"))
