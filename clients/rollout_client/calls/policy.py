"""The calls of `/policy`: the request and the response of each. No I/O."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, TypedDict

from pydantic import RootModel

from rollout_client.calls.call import Call, Query, call_for, call_without_result, without_none
from rollout_client.calls.json_values import json_bytes, json_value
from rollout_client.calls.options import CallOptions, Deadline, without_call_options
from rollout_client.contract.policy import (
    CheckpointSource,
    IfBusy,
    NamedPolicyState,
    PauseMode,
    PolicyLayout,
    PolicyState,
    PolicyUpdate,
    PushOptions,
    RollbackTarget,
    SwitchOptions,
    TransferInit,
    TransferUpdate,
    TransferWorld,
    UploadState,
    Version,
    WeightsKind,
)
from rollout_client.errors import RequestRejected, RolloutTimeout

logger = logging.getLogger("rollout_client")


class UpdateOptions(TypedDict, total=False):
    """How the replicas change to new weights; see `SwitchOptions`. The service's defaults apply to missing keys."""

    mode: PauseMode
    """The fate of generations in progress: `keep`, `wait` or `abort`."""
    reset_prefix_cache: bool
    """Whether to drop the KV cache of the old weights."""
    if_busy: IfBusy
    """Behaviour while another update is in progress: `wait` or `refuse`."""


class PushCallOptions(UpdateOptions, CallOptions, total=False):
    """Options of `push_weights`, `load_checkpoint` and `rollback` beside the weights."""


class PushAnswer(RootModel[PolicyUpdate | UploadState]):
    """The answer of `PUT /policy/versions/{version}`: the update, or the state of an incomplete upload."""


def policy_call(
    min_version: Version | None = None, wait_s: float = 0.0, checksums_within_s: float = 0.0
) -> Call[PolicyState]:
    query = {
        "min_version": min_version,
        "wait_s": None if min_version is None else wait_s,
        "checksums_within_s": checksums_within_s or None,
    }
    return call_for(PolicyState, "GET", "/policy", query=query)


def policy_layout_call() -> Call[PolicyLayout]:
    return call_for(PolicyLayout, "GET", "/policy/layout")


def upload_state_call(version: Version, name: str | None = None) -> Call[UploadState]:
    return call_for(UploadState, "GET", f"{version_path(version)}/upload", query={"name": name})


def drop_policy_call(name: str) -> Call[None]:
    return call_without_result("DELETE", f"/policy/names/{name}")


def chunk_call(
    version: Version, query: Query, chunk: bytes, headers: Mapping[str, str]
) -> Call[PolicyUpdate | UploadState]:
    call = call_for(PushAnswer, "PUT", version_path(version), query=query, body=chunk, content_headers=headers)
    return call.picking(lambda answer: answer.root)


def checkpoint_call(version: Version, query: Query, checkpoint: str) -> Call[PolicyUpdate]:
    return call_for(
        PolicyUpdate,
        "PUT",
        version_path(version),
        query=query,
        body=json_bytes(CheckpointSource(checkpoint=checkpoint)),
    )


def rollback_call(
    to: Version, version: Version | None, options: UpdateOptions, name: str | None = None
) -> Call[PolicyUpdate]:
    body = json_bytes(RollbackTarget(to=to, version=version, name=name).model_dump(exclude_none=True))
    return call_for(PolicyUpdate, "POST", "/policy/rollback", query=switch_query(options), body=body)


def init_transfer_call(init_info: Mapping[str, Any]) -> Call[int]:
    """Its answer, the world size, comes once every replica has connected to the trainer."""
    body = json_bytes(TransferInit(init_info=json_value(dict(init_info), "init_info")))
    return call_for(TransferWorld, "POST", "/policy/transfer/init", body=body).picking(lambda world: world.world_size)


def start_transfer_call(options: UpdateOptions) -> Call[None]:
    return call_without_result("POST", "/policy/transfer/start", query=switch_query(options))


def update_transfer_call(update_info: Any) -> Call[None]:
    body = json_bytes(TransferUpdate(update_info=json_value(update_info, "update_info")))
    return call_without_result("POST", "/policy/transfer/update", body=body)


def finish_transfer_call(version: Version | None) -> Call[PolicyUpdate]:
    return call_for(PolicyUpdate, "POST", "/policy/transfer/finish", query={"version": version})


def switch_query(options: UpdateOptions) -> Query:
    return SwitchOptions(**without_call_options(options)).model_dump(mode="json", exclude_unset=True)


def with_logged_warnings(update: PolicyUpdate) -> PolicyUpdate:
    for warning in update.warnings:
        logger.warning("Version %s: %s", update.label, warning)
    return update


def push_query(
    kind: WeightsKind,
    base: Version | None,
    options: PushCallOptions,
    checksum: str | None = None,
    name: str | None = None,
) -> Query:
    """The query of a push, with the given options only. Raises `ValueError` for options that the service refuses."""
    optional: dict[str, Any] = {"base": base, "checksum": checksum, "name": name}
    if (kind == "delta" and base is None) or (kind == "full" and base is not None):
        raise ValueError(
            f"kind={kind!r} and base={base!r}: a delta needs the version that it changes, partial weights may name the "
            "one that has the other tensors and an adapter the one that it was trained on, full weights have none."
        )
    return PushOptions(kind=kind, **without_call_options(options), **without_none(optional)).model_dump(
        mode="json", exclude_unset=True
    )


def next_version(state: PolicyState, name: str | None = None) -> Version:
    """The number that the service says, and at least the lowest above every version that it knows.

    Args:
        name: the named policy whose version is meant; by default the policy without a name.
    """
    if name is not None:
        policy = named_state(state, name)
        return 1 if policy is None else policy.next_version
    known = [info.version for info in state.versions]
    updating_to = -1 if state.updating_to is None else state.updating_to
    return max(state.next_version or 0, 1 + max([state.current, updating_to, *known]))


def named_state(state: PolicyState, name: str) -> NamedPolicyState | None:
    return next((policy for policy in state.named if policy.name == name), None)


def is_updating_to(state: PolicyState, version: Version, name: str | None = None) -> bool:
    """Whether an update to `version`, of the policy `name`, is in progress; its outcome is not known yet."""
    policy = state if name is None else named_state(state, name)
    return policy is not None and policy.updating_to == version


def is_known(state: PolicyState, version: Version, name: str | None = None) -> bool:
    """Whether all of `version`, of the policy `name`, has arrived at the service."""
    policy = state if name is None else named_state(state, name)
    older = [info.version for info in state.versions] if name is None else []
    return policy is not None and version in (policy.current, *older)


def version_path(version: Version) -> str:
    return f"/policy/versions/{version}"


LONGEST_QUESTION_S = 20.0
"""Seconds; proxies cut connections that are silent for 30 s or more."""
SHORTEST_PAUSE_S = 0.2
"""Seconds between two questions: a service that answers at once must not be asked in a tight loop."""
RESPONSE_S = 60.0
"""Added to the time for which the service holds the question back: a proxy may have to come back meanwhile."""


def pause_s(error: RequestRejected, version: Version, deadline: Deadline) -> float:
    """Seconds to pause before `version` is asked for again.

    Raises:
        RequestRejected: `error`, unless it says that the version is not current yet.
        RolloutTimeout: the deadline has passed.
    """
    if error.problem.status != HTTPStatus.CONFLICT:
        raise error
    if not (left_s := deadline.remaining_s()):
        raise RolloutTimeout(
            f"Version {version} was not current after {deadline.timeout_s:g} s. Check that it is pushed, or allow "
            "more with timeout_s."
        ) from error
    return min(left_s, SHORTEST_PAUSE_S)
