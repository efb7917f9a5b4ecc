"""The stores over their Serve handles: a call of a method is a call of the store's method of the same name.

A client has the type of its store, whose module only type checkers import: it loads the store's databases or weights.
"""

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ray.serve.handle import DeploymentHandle

from deployments.failures import JobStoreLost, PolicyStoreLost, RolloutFailure, RolloutRecordsLost
from deployments.rpc.handle_calls import call_result

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
