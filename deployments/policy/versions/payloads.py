"""The weights that a replica lacks, in the form in which it fetches them."""

from collections.abc import Callable, Sequence
from typing import Any

from deployments.policy.replicas.commands import LoadedWeights, VersionPayload
from deployments.policy.versions.version_history import PolicyVersions
from deployments.policy.versions.version_store import StoredVersion

CHUNK_BYTES = 64 * 2**20


class Payloads:
    """Reads files: call it from a thread.

    Args:
        put: stores a chunk for the replicas on all nodes, and returns a reference that they can await.
    """

    def __init__(self, versions: PolicyVersions, put: Callable[[bytes], Any]) -> None:
        self._versions = versions
        self._put = put

    def missing(self, loaded: LoadedWeights) -> Sequence[VersionPayload] | None:
        """What a replica that holds `loaded` has to load, in this order, to hold what is desired.

        `None` if the service does not have it: a trainer sent the current weights straight to the replicas.
        """
        desired = self._versions.desired
        if loaded == desired:
            return []
        payloads = []
        if loaded.full != desired.full or desired.adapter is None:
            if self._versions.info(desired.full).kind == "transfer":
                return None
            payloads.append(self.payload(desired.full))
        if desired.adapter is not None:
            payloads.append(self.payload(desired.adapter))
        return payloads

    def payload(self, version: int) -> VersionPayload:
        """Puts the weights into Ray's object store once, from where the replicas of all nodes fetch them."""
        info = self._versions.info(version)
        with self._versions.file(version).open("rb") as file:
            chunks = tuple(self._put(chunk) for chunk in iter(lambda: file.read(CHUNK_BYTES), b""))
        if isinstance(info, StoredVersion) and info.kind == "adapter":
            return VersionPayload(version, "adapter", chunks, info.adapter_config, self._versions.record(version))
        return VersionPayload(version, "full", chunks, record=self._versions.record(version))
