"""What the policy store knows of versions, as plain data: `recovery/standing.py` compares replicas with it."""

from collections.abc import Mapping
from dataclasses import dataclass

from deployments.policy.versions.version_store import StoredVersion


@dataclass(frozen=True, slots=True)
class KnownVersions:
    """
    Args:
        current: the version that is current on disk.
        stored: by their numbers.
        tried: versions above the current one that were refused, or under way when a store died.
    """

    run: str
    current: int
    stored: Mapping[int, StoredVersion]
    tried: Mapping[int, StoredVersion]
