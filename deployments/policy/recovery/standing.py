"""How a replica that registers stands to the policy store: what it holds, compared with what the store knows. No I/O.

| the replica holds | its standing | what follows |
| --- | --- | --- |
| no version, or those that the store knows | `KNOWN` | it loads what it lacks |
| a version above the current one, on trial | `KNOWN` | it goes back: no rollout has tokens of the version |
| a version that was refused, or under way when the store died | `TRIED` | it goes back; the number is not given again |
| a version above the current one | `AHEAD` | the store takes the version over |
| other weights under a number that the store knows, or those of another run | `DIFFERENT` | it is replaced |

Two contents of a version are the same if they have the same checksum, or, where one is not known, as after a transfer,
were made at the same time. Of what is not known nothing is said: it counts as the same.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

from deployments.policy.replicas.commands import ReplicaRegistration
from deployments.policy.versions.known_versions import KnownVersions
from deployments.policy.versions.version_store import StoredVersion


class Standing(Enum):
    KNOWN = "known"
    TRIED = "tried"
    AHEAD = "ahead"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Verdict:
    standing: Standing
    reason: str = ""
    """Of `DIFFERENT`."""


def held_versions(registration: ReplicaRegistration) -> list[StoredVersion]:
    """The versions that the replica has loaded, as it knows them: full weights, then the adapter. Without version 0.

    Of a version without a record only the number is known, as after a transfer.
    """
    loaded = registration.loaded
    held = []
    for version in (loaded.full, loaded.adapter):
        if version:
            record = registration.records.get(version)
            held.append(unrecorded(registration, version) if record is None else read_record(record))
    return held


def read_record(record: str) -> StoredVersion:
    return StoredVersion.model_validate_json(record)


def unrecorded(registration: ReplicaRegistration, version: int) -> StoredVersion:
    loaded = registration.loaded
    now = datetime.now(UTC)
    if version == loaded.adapter:
        return StoredVersion(version=version, kind="adapter", base=loaded.full, created_at=now)
    return StoredVersion(version=version, kind="transfer", created_at=now)


def standing_of(registration: ReplicaRegistration, known: KnownVersions) -> Verdict:
    held = [version for version in held_versions(registration) if version.version in registration.records]
    for version in held:
        if reason := difference(version, known):
            return Verdict(Standing.DIFFERENT, reason)
    newest = registration.loaded.version
    if newest <= known.current or registration.is_on_trial:
        return Verdict(Standing.KNOWN)
    return Verdict(Standing.TRIED if newest in known.tried else Standing.AHEAD)


def difference(held: StoredVersion, known: KnownVersions) -> str | None:
    """Why the version cannot be what the store knows under its number."""
    if held.run not in (None, known.run):
        return f"it holds version {held.version} of the run {held.run}, and this is the run {known.run}"
    for versions in (known.stored, known.tried):
        other = versions.get(held.version)
        if other is not None and not are_same(held, other):
            return f"it holds other weights as version {held.version} than the policy store knows under this number"
    return None


def are_same(one: StoredVersion, other: StoredVersion) -> bool:
    if one.checksum is None or other.checksum is None:
        return one.created_at == other.created_at
    return one.checksum == other.checksum
