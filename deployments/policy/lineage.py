"""Which full weights an adapter or a delta belongs to, and whether those are there."""

from typing import NamedTuple

from deployments.policy.failures import PolicyNotCurrent, WeightsRefused
from deployments.policy.versions import Versions
from rollout_client.contract.policy import PushOptions
from rollout_client.contract.problems import FieldProblem

OTHER_BASE = (
    "the adapter was trained on these full weights, and others are current, version {full}: make its own current first "
    "(POST /policy/rollback), or train it on those"
)


class _FullWeights(NamedTuple):
    """The identity of full weights, also once their version is no longer stored."""

    version: int
    checksum: str | None = None


def current_full_weights(versions: Versions) -> _FullWeights:
    full = versions.desired.full
    info = versions.find(full)
    return _FullWeights(full, None if info is None else info.checksum)


def last_adapter_base(versions: Versions) -> _FullWeights | None:
    """On which the last of the stored adapters became current."""
    bases = [info.base for info in versions.all if info.kind == "adapter" and info.base is not None]
    return _FullWeights(bases[-1]) if bases else None


def are_same(versions: Versions, one: int, other: int) -> bool:
    """Whether two versions have the same weights, as far as is known."""
    one, other = _origin(versions, one), _origin(versions, other)
    if one == other:
        return True
    checksums = [info.checksum for info in map(versions.find, (one, other)) if info is not None]
    return len(checksums) == 2 and checksums[0] == checksums[1] is not None


def _origin(versions: Versions, version: int) -> int:
    """The version whose weights it has again, if it is a rollback."""
    while (info := versions.find(version)) is not None and info.rollback_of is not None:
        version = info.rollback_of
    return version


def refuse_other_base(versions: Versions, options: PushOptions) -> None:
    """Raises `PolicyNotCurrent` unless the current full weights are those that an adapter was trained on.

    Call it from a thread.
    """
    full, problem = versions.desired.full, None
    if options.base is not None and not are_same(versions, options.base, full):
        problem = FieldProblem(field="base", message=OTHER_BASE.format(full=full), value=options.base)
    elif options.base_checksum is not None and options.base_checksum != (found := versions.checksum(full)):
        message = f"{OTHER_BASE.format(full=full)}; their checksum is {found}"
        problem = FieldProblem(field="base_checksum", message=message, value=options.base_checksum)
    if problem is not None:
        raise PolicyNotCurrent(problem)


def warnings_of_base(versions: Versions, before: _FullWeights | None, options: PushOptions) -> list[str]:
    """Warns the sender of an adapter if the one before was served on other full weights than the current.

    Args:
        before: on which that was; `None` without an adapter before.
        options: if they demand a base, the sender knows which it is.
    """
    full, is_demanded = current_full_weights(versions), (options.base, options.base_checksum) != (None, None)
    if is_demanded or before is None or are_same(versions, before.version, full.version):
        return []
    if before.checksum is not None and before.checksum == full.checksum:
        return []
    return [
        f"The adapter is served on the full weights of version {full.version}, and the one before it was on "
        f"version {before.version}. If it was trained on {before.version}, roll back to that version and push it "
        "again."
    ]


def delta_base(versions: Versions, version: int | None) -> int:
    """The version that a delta changes, or that completes partial weights.

    Raises:
        WeightsRefused: the delta names no base, or one without full weights here.
        VersionUnknown: the base is not stored, or no longer.
    """
    if version is None:
        raise WeightsRefused.of("base", "a delta must say which version it changes")
    is_adapter = version > 0 and versions.info(version).kind == "adapter"
    if is_adapter or not versions.has_weights(version):
        raise WeightsRefused.of("base", "the version has no full weights here", version)
    return version
