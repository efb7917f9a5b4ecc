"""The calls of `/policy`: what each sends and how its answer is read. No I/O."""

from collections.abc import Mapping
from typing import Any, TypedDict

from pydantic import RootModel

from rollout_client.policy_contract import (
    CheckpointSource,
    IfBusy,
    PauseMode,
    PolicyLayout,
    PolicyState,
    PolicyUpdate,
    PushOptions,
    SwitchOptions,
    TransferInit,
    TransferUpdate,
    TransferWorld,
    UploadState,
    Version,
    WeightsKind,
)
from rollout_client.rollout_calls import Call, parsed

Query = Mapping[str, int | float | str]


class UpdateOptions(TypedDict, total=False):
    """How new weights take the place of the old ones. What is missing is the service's own default."""

    mode: PauseMode
    """What becomes of generations under way: `keep`, `wait` or `abort`."""
    reset_prefix_cache: bool
    """Whether what was computed with the old weights is computed anew."""
    if_busy: IfBusy
    """While another update is under way: `wait` or `refuse`."""


class PushAnswer(RootModel[PolicyUpdate | UploadState]):
    """Of `PUT /policy/versions/{version}`: an update once all has arrived, until then how much has."""


def policy_call(
    min_version: Version | None = None, wait_s: float = 0.0, checksums_within_s: float | None = None
) -> Call[PolicyState]:
    query: dict[str, int | float | str] = {}
    if min_version is not None:
        query |= {"min_version": min_version, "wait_s": wait_s}
    if checksums_within_s is not None:
        query["checksums_within_s"] = checksums_within_s
    return Call("GET", "/policy", lambda body: parsed(PolicyState, "The answer of GET /policy", body), query=query)


def policy_layout_call() -> Call[PolicyLayout]:
    path = "/policy/layout"
    return Call("GET", path, lambda body: parsed(PolicyLayout, f"The answer of GET {path}", body))


def upload_state_call(version: Version) -> Call[UploadState]:
    path = f"{version_path(version)}/upload"
    return Call("GET", path, lambda body: parsed(UploadState, f"The answer of GET {path}", body))


def piece_call(
    version: Version, query: Query, piece: bytes, headers: Mapping[str, str]
) -> Call[PolicyUpdate | UploadState]:
    def read(body: bytes) -> PolicyUpdate | UploadState:
        return parsed(PushAnswer, f"The answer of PUT {version_path(version)}", body).root

    return Call("PUT", version_path(version), read, query=query, body=piece, content_headers=headers)


def checkpoint_call(version: Version, query: Query, checkpoint: str) -> Call[PolicyUpdate]:
    path = version_path(version)
    body = CheckpointSource(checkpoint=checkpoint).model_dump_json().encode()
    return Call(
        "PUT", path, lambda body: parsed(PolicyUpdate, f"The answer of PUT {path}", body), query=query, body=body
    )


def init_transfer_call(init_info: Mapping[str, Any]) -> Call[int]:
    """Answered, with the world size, once every replica has met the trainer."""
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


def push_query(kind: WeightsKind, base: Version | None, options: UpdateOptions) -> Query:
    """Only what was given is sent; raises `ValueError` where it is none of what the service knows."""
    given: dict[str, Any] = {"kind": kind, **options} | ({} if base is None else {"base": base})
    if (kind == "delta") != (base is not None):
        raise ValueError(
            f"kind={kind!r} and base={base!r}: a delta needs the version that it changes, others have none."
        )
    return PushOptions(**given).model_dump(mode="json", exclude_unset=True)


def next_version(state: PolicyState) -> Version:
    """One more than every version that the service knows."""
    known = [info.version for info in state.versions]
    return 1 + max([state.current, *known] + ([] if state.updating_to is None else [state.updating_to]))


def is_being_brought(state: PolicyState, version: Version) -> bool:
    """Whether `version` is on its way to the replicas; how that ends is not known yet."""
    return state.updating_to == version


def is_known(state: PolicyState, version: Version) -> bool:
    """Whether `version` is at the service as a whole."""
    return version in {state.current, *(info.version for info in state.versions)}


def version_path(version: Version) -> str:
    return f"/policy/versions/{version}"
