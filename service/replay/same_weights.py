"""Which version of now has the weights that made recorded tokens: the same one, or one that goes back to it."""

from collections.abc import Iterable, Mapping

from rollout_client.contract.base import VersionLabel, label_of
from rollout_client.contract.policy import PolicyState, VersionInfo
from service.remote.policy import RemotePolicy

Serving = Mapping[VersionLabel, VersionLabel]


async def served_weights(
    policy: RemotePolicy, labels: Iterable[VersionLabel]
) -> tuple[Serving, Mapping[VersionLabel, str]]:
    """For each label the version that has its weights now, or why there is none. Raises `PolicyStoreLost`."""
    wanted = set(labels)
    if not wanted:
        return {}, {}
    state = await policy.store.state(0.0)
    found = {label: serving(label, state) for label in wanted}
    served = {label: now for label, now in found.items() if isinstance(now, VersionLabel)}
    return served, {label: why for label, why in found.items() if isinstance(why, str)}


def serving(label: VersionLabel, state: PolicyState) -> VersionLabel | str:
    """The version that has the weights of `label` now, or a sentence that says why none has."""
    if label.name is not None:
        return _serving_named(label, state)
    versions = {info.version: info for info in state.versions}
    if _are_same(label.number, state.current, versions):
        return VersionLabel(None, state.current)
    made = versions.get(label.number)
    is_adapter = made is not None and made.kind == "adapter"
    if made is not None and is_adapter:
        for named in state.named:
            is_on_same = named.base is not None and _are_same(named.base, made.base or 0, versions)
            if named.current is not None and is_on_same and named.checksum == made.checksum is not None:
                return VersionLabel(named.name, named.current)
    kept = [str(info.version) for info in state.versions]
    begin = f"version {label.number} made tokens of it, and version {state.current} is current"
    if str(label.number) not in kept:
        return f"{begin}; the service has the weights of {', '.join(kept)} alone"
    name, weights = (" --name again", "serve its adapter") if is_adapter else ("", "make its weights current")
    return f"{begin}; {weights} again (`rollout policy rollback {label.number}{name}`), and then replay it"


def _serving_named(label: VersionLabel, state: PolicyState) -> VersionLabel | str:
    current = {named.name: named.current for named in state.named}
    if current.get(label.name or "") == label.number:
        return label
    served = [label_of(name, number) for name, number in current.items() if number is not None]
    kept = f"served are {', '.join(served)}" if served else "no named policy is served"
    return f"{label_of(*label)} made tokens of it, and {kept}; of a named policy only the current version is kept"


def _are_same(one: int, other: int, versions: Mapping[int, VersionInfo]) -> bool:
    """Whether two versions have the same weights. Those of an adapter are on their base."""
    one, other = _origin(one, versions), _origin(other, versions)
    if one == other:
        return True
    first, second = versions.get(one), versions.get(other)
    if first is None or second is None or first.checksum is None or first.checksum != second.checksum:
        return False
    if (first.kind == "adapter") != (second.kind == "adapter"):
        return False
    return first.kind != "adapter" or _are_same(first.base or 0, second.base or 0, versions)


def _origin(version: int, versions: Mapping[int, VersionInfo]) -> int:
    """The version whose weights it has again, if it is a rollback of full weights."""
    while (info := versions.get(version)) is not None and info.rollback_of is not None and info.kind != "adapter":
        version = info.rollback_of
    return version
