"""The calls of `/policy`: the request of each, and how its response is parsed. No I/O.

`VersionWait` waits for a version by long polling.
"""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, TypedDict

from pydantic import RootModel

from rollout_client.calls.options import CallOptions, Deadline
from rollout_client.calls.rollouts import Call, parsed
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

Query = Mapping[str, int | float | str]


class UpdateOptions(TypedDict, total=False):
    """How the replicas change to new weights; see `SwitchOptions`. The service's defaults apply to missing keys."""

    mode: PauseMode
    """What happens to generations in progress: `keep`, `wait` or `abort`."""
    reset_prefix_cache: bool
    """Whether to drop the KV cache of the old weights."""
    if_busy: IfBusy
    """What to do while another update is in progress: `wait` or `refuse`."""


class PushCallOptions(UpdateOptions, CallOptions, total=False):
    """What `push_weights`, `load_checkpoint` and `rollback` take beside the weights."""


class PushAnswer(RootModel[PolicyUpdate | UploadState]):
    """The answer of `PUT /policy/versions/{version}`: the update, or the state of an incomplete upload."""


def policy_call(
    min_version: Version | None = None, wait_s: float = 0.0, checksums_within_s: float = 0.0
) -> Call[PolicyState]:
    query: dict[str, int | float | str] = {}
    if min_version is not None:
        query |= {"min_version": min_version, "wait_s": wait_s}
    if checksums_within_s:
        query["checksums_within_s"] = checksums_within_s
    return Call("GET", "/policy", lambda body: parsed(PolicyState, "The answer of GET /policy", body), query=query)


def policy_layout_call() -> Call[PolicyLayout]:
    path = "/policy/layout"
    return Call("GET", path, lambda body: parsed(PolicyLayout, f"The answer of GET {path}", body))


def upload_state_call(version: Version, name: str | None = None) -> Call[UploadState]:
    path = f"{version_path(version)}/upload"
    query = {} if name is None else {"name": name}
    return Call("GET", path, lambda body: parsed(UploadState, f"The answer of GET {path}", body), query=query)


def drop_policy_call(name: str) -> Call[None]:
    return Call("DELETE", f"/policy/names/{name}", lambda _body: None)


def chunk_call(
    version: Version, query: Query, chunk: bytes, headers: Mapping[str, str]
) -> Call[PolicyUpdate | UploadState]:
    def read(body: bytes) -> PolicyUpdate | UploadState:
        return parsed(PushAnswer, f"The answer of PUT {version_path(version)}", body).root

    return Call("PUT", version_path(version), read, query=query, body=chunk, content_headers=headers)


def checkpoint_call(version: Version, query: Query, checkpoint: str) -> Call[PolicyUpdate]:
    path = version_path(version)
    body = CheckpointSource(checkpoint=checkpoint).model_dump_json().encode()
    return Call(
        "PUT", path, lambda body: parsed(PolicyUpdate, f"The answer of PUT {path}", body), query=query, body=body
    )


def rollback_call(to: Version, version: Version | None, options: UpdateOptions) -> Call[PolicyUpdate]:
    path = "/policy/rollback"
    return Call(
        "POST",
        path,
        lambda body: parsed(PolicyUpdate, f"The answer of POST {path}", body),
        query=SwitchOptions(**options).model_dump(mode="json", exclude_unset=True),
        body=RollbackTarget(to=to, version=version).model_dump_json(exclude_none=True).encode(),
    )


def init_transfer_call(init_info: Mapping[str, Any]) -> Call[int]:
    """Its answer, the world size, comes once every replica has connected to the trainer."""
    path = "/policy/transfer/init"

    def read(body: bytes) -> int:
        return parsed(TransferWorld, f"The answer of POST {path}", body).world_size

    return Call("POST", path, read, body=TransferInit(init_info=dict(init_info)).model_dump_json().encode())


def start_transfer_call(options: UpdateOptions) -> Call[None]:
    query = SwitchOptions(**options).model_dump(mode="json", exclude_unset=True)
    return Call("POST", "/policy/transfer/start", lambda _body: None, query=query)


def update_transfer_call(update_info: Any) -> Call[None]:
    body = TransferUpdate(update_info=update_info).model_dump_json().encode()
    return Call("POST", "/policy/transfer/update", lambda _body: None, body=body)


def finish_transfer_call(version: Version | None) -> Call[PolicyUpdate]:
    path = "/policy/transfer/finish"
    query = {} if version is None else {"version": version}
    return Call("POST", path, lambda body: parsed(PolicyUpdate, f"The answer of POST {path}", body), query=query)


def with_logged_warnings(update: PolicyUpdate) -> PolicyUpdate:
    for warning in update.warnings:
        logger.warning("Version %s: %s", update.label, warning)
    return update


def push_query(
    kind: WeightsKind,
    base: Version | str | None,
    options: UpdateOptions,
    checksum: str | None = None,
    name: str | None = None,
) -> Query:
    """The query of a push, with the given options only. Raises `ValueError` for options that the service refuses.

    Args:
        base: of an adapter also the checksum of its base.
    """
    optional = {"base_checksum" if isinstance(base, str) else "base": base, "checksum": checksum, "name": name}
    given: dict[str, Any] = {
        "kind": kind,
        **options,
        **{name: value for name, value in optional.items() if value is not None},
    }
    if (kind == "delta" and base is None) or (kind == "full" and base is not None):
        raise ValueError(
            f"kind={kind!r} and base={base!r}: a delta needs the version that it changes, partial weights may name the "
            "one that has the other tensors and an adapter the one that it was trained on, full weights have none."
        )
    return PushOptions(**given).model_dump(mode="json", exclude_unset=True)


def next_version(state: PolicyState, name: str | None = None) -> Version:
    """What the service says, and at least the lowest number above every version that it knows.

    Args:
        name: the named policy whose version is meant; by default the policy without a name.
    """
    if name is not None:
        policy = named_state(state, name)
        return 1 if policy is None else policy.next_version
    known = [info.version for info in state.versions]
    return max(
        state.next_version or 0,
        1 + max([state.current, *known] + ([] if state.updating_to is None else [state.updating_to])),
    )


def named_state(state: PolicyState, name: str) -> NamedPolicyState | None:
    return next((policy for policy in state.named if policy.name == name), None)


def is_updating_to(state: PolicyState, version: Version, name: str | None = None) -> bool:
    """Whether an update to `version` is in progress; its outcome is not known yet. Args: as in `next_version`."""
    if name is not None:
        policy = named_state(state, name)
        return policy is not None and policy.updating_to == version
    return state.updating_to == version


def is_known(state: PolicyState, version: Version, name: str | None = None) -> bool:
    """Whether all of `version` has arrived at the service. Args: as in `next_version`."""
    if name is not None:
        policy = named_state(state, name)
        return policy is not None and policy.current == version
    return version in {state.current, *(info.version for info in state.versions)}


def version_path(version: Version) -> str:
    return f"/policy/versions/{version}"


LONGEST_QUESTION_S = 20.0
"""Seconds; proxies cut connections that are silent for 30 s or more."""
SHORTEST_PAUSE_S = 0.2
"""Seconds between two questions: a service that answers at once must not be asked in a tight loop."""
RESPONSE_S = 60.0
"""Added to the time for which the service holds the question back: a proxy may have to come back meanwhile."""


class VersionWait:
    """Asks for `version` or a newer one until it is current, for at most `timeout_s` seconds."""

    def __init__(self, version: Version, timeout_s: float) -> None:
        self._version = version
        self._deadline = Deadline(timeout_s)
        self._question_s = 0.0

    def call(self) -> Call[PolicyState]:
        """The next question."""
        self._question_s = min(self._left_s(), LONGEST_QUESTION_S)
        return policy_call(self._version, round(self._question_s, 3))

    @property
    def call_timeout_s(self) -> float:
        """Seconds that the last call may take, its retries included."""
        return self._question_s + RESPONSE_S

    def pause_s(self, error: RequestRejected) -> float:
        """Seconds to pause before the next question.

        Raises:
            RequestRejected: `error`, unless it says that the version is not current yet.
            RolloutTimeout: `timeout_s` is over.
        """
        if error.problem.status != HTTPStatus.CONFLICT:
            raise error
        if not (left_s := self._left_s()):
            raise RolloutTimeout(
                f"Version {self._version} was not current after {self._deadline.timeout_s:g} s. Check that somebody "
                "pushes it, or allow more with timeout_s."
            ) from error
        return min(left_s, SHORTEST_PAUSE_S)

    def _left_s(self) -> float:
        try:
            return self._deadline.left_s() or 0.0
        except RolloutTimeout:
            return 0.0
