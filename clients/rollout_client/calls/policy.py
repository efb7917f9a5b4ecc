"""Options of the calls about weights, and readings of the state of the policy. No I/O."""

import logging
from http import HTTPStatus
from typing import TypedDict

from pydantic import RootModel

from rollout_client.calls.call import Query, without_none
from rollout_client.calls.options import CallLimits, CallOptions, without_call_options
from rollout_client.contract.policy import (
    IfBusy,
    NamedPolicyState,
    PauseMode,
    PolicyState,
    PolicyUpdate,
    PushOptions,
    SwitchOptions,
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


class SwitchCallOptions(UpdateOptions, CallOptions, total=False):
    """Options of `rollback` beside the version."""


class PusherOptions(SwitchCallOptions, total=False):
    """Options of a `PolicyPusher`'s pushes."""

    progress: bool


class PushCallOptions(SwitchCallOptions, total=False):
    """Options of `push_weights` and `load_checkpoint` beside the weights; `push_weights` describes them."""

    kind: WeightsKind
    base: Version | None
    checksum: str | None
    name: str | None


class PushAnswer(RootModel[PolicyUpdate | UploadState]):
    """The answer of `PUT /policy/versions/{version}`: the update, or the state of an incomplete upload."""


def switch_query(options: UpdateOptions) -> Query:
    return SwitchOptions(**without_call_options(options)).model_dump(mode="json", exclude_unset=True)


def with_logged_warnings(update: PolicyUpdate) -> PolicyUpdate:
    for warning in update.warnings:
        logger.warning("Version %s: %s", update.label, warning)
    return update


def push_query(options: PushCallOptions) -> Query:
    """The query of a push, with the given options only. Raises `ValueError` for options that the service refuses."""
    query = PushOptions(**{"kind": "full", **without_none(without_call_options(options))})
    if (query.kind == "delta" and query.base is None) or (query.kind == "full" and query.base is not None):
        raise ValueError(
            f"kind={query.kind!r} and base={query.base!r}: a delta needs the version that it changes, partial weights "
            "may name the one that has the other tensors and an adapter the one that it was trained on, full weights "
            "have none."
        )
    return query.model_dump(mode="json", exclude_unset=True)


def policy_of(state: PolicyState, name: str | None) -> PolicyState | NamedPolicyState | None:
    """The policy `name`; without a name `state` itself."""
    return state if name is None else next((policy for policy in state.named if policy.name == name), None)


def next_version(state: PolicyState, name: str | None = None) -> Version:
    """The lowest number that the next version of the policy `name` may have."""
    policy = policy_of(state, name)
    return 1 if policy is None or policy.next_version is None else policy.next_version


def is_updating_to(state: PolicyState, version: Version, name: str | None = None) -> bool:
    """Whether an update to `version`, of the policy `name`, is in progress; its outcome is not known yet."""
    policy = policy_of(state, name)
    return policy is not None and policy.updating_to == version


def is_known(state: PolicyState, version: Version, name: str | None = None) -> bool:
    """Whether all of `version`, of the policy `name`, has arrived at the service."""
    policy = policy_of(state, name)
    older = [info.version for info in state.versions] if name is None else []
    return policy is not None and version in (policy.current, *older)


LONGEST_QUESTION_S = 20.0
"""Seconds; proxies cut connections that are silent for 30 s or more."""
SHORTEST_PAUSE_S = 0.2
"""Seconds between two questions: a service that answers at once must not be asked in a tight loop."""
RESPONSE_S = 60.0
"""Added to the time for which the service holds the question back: a proxy may have to come back meanwhile."""


def pause_s(error: RequestRejected, version: Version, limits: CallLimits) -> float:
    """Seconds to pause before `version` is asked for again.

    Raises:
        RequestRejected: `error`, unless it says that the version is not current yet.
        RolloutTimeout: the deadline has passed.
    """
    if error.problem.status != HTTPStatus.CONFLICT:
        raise error
    if not (left_s := limits.remaining_s()):
        raise RolloutTimeout(
            f"Version {version} was not current after {limits.timeout_s:g} s. Check that it is pushed, or allow "
            "more with timeout_s."
        ) from error
    return min(left_s, SHORTEST_PAUSE_S)
