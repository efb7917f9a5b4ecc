"""Versions that are stored as what changed since another one: a chain of deltas behind a file with full weights.

Guarantees: the full weights of a version are made only when they are needed, once, and only if they have the checksum
that the version is known by; from then on the version needs no other one.
"""

from pathlib import Path
from threading import Lock

from deployments.policy.failures import VersionUnknown, WeightsRefused
from deployments.policy.replicas.delta_application import write_applied
from deployments.policy.versions.assembly import BASE_REMOVED
from deployments.policy.versions.durable_files import make_folder_durably
from deployments.policy.versions.initial_version import InitialVersion
from deployments.policy.versions.version_store import StoredVersion, VersionStore
from rollout_client.problem_contract import FieldProblem
from rollout_client.weights.delta import BadDelta
from rollout_client.weights.safetensors_file import NotSafetensors


class DeltaChains:
    def __init__(self, store: VersionStore, initial: InitialVersion) -> None:
        self._store = store
        self._initial = initial
        self._making = Lock()

    def links(self, version: int) -> list[int]:
        """The versions that the full weights of `version` are made of: the one with a file first, `version` last.

        `version` alone if it has a file; none if something is missing, as after a transfer.
        """
        links = [version]
        while links[0] and not self._store.weights(links[0]).exists():
            info = self._info(links[0])
            if info is None or info.base is None or not self._store.delta(links[0]).exists():
                return []
            links.insert(0, info.base)
        return links

    def bytes_behind(self, version: int) -> int:
        """Size of the deltas that the full weights of `version` would be made of."""
        return sum(self._store.delta(link).stat().st_size for link in self.links(version)[1:])

    def file(self, version: int) -> Path:
        """The full weights, or an adapter; full weights are made if only changes are stored. Call it from a thread.

        Raises:
            VersionUnknown: the version, or one that it needs, is not stored, or no longer.
            WeightsRefused: the deltas make other weights than those that the version is known by.
        """
        if version == 0:
            return self._initial.file()
        path = self._store.weights(version)
        if not path.exists():
            with self._making:
                if not path.exists():
                    self._make(version)
        return path

    def applied(self, base: int, delta: Path, full: Path) -> str:
        """Writes the full weights that `delta` makes of version `base`, and returns their checksum.

        Raises:
            WeightsRefused: the delta does not fit its base, or the base was removed meanwhile.
        """
        try:
            return self._write(base, delta, full)
        except BadDelta as error:
            raise refused(str(error).removeprefix(f"{error.tensor}: "), error.tensor) from error
        except NotSafetensors as error:
            raise refused(str(error)) from error
        except FileNotFoundError as error:
            raise refused(BASE_REMOVED, "base") from error

    def _make(self, version: int) -> None:
        info = self._info(version)
        if info is None or info.base is None or not self.links(version):
            raise unknown(version)
        making = self._store.making_weights(version)
        make_folder_durably(making.parent)
        try:
            checksum = self._write(info.base, self._store.delta(version), making)
            if checksum != info.checksum:
                raise other_weights(info, checksum)
            self._store.add_weights(version, making)
        except (BadDelta, NotSafetensors) as error:
            raise refused(str(error)) from error
        except FileNotFoundError as error:
            raise unknown(version) from error
        finally:
            making.unlink(missing_ok=True)

    def _write(self, base: int, delta: Path, full: Path) -> str:
        """Raises `FileNotFoundError` if something of the base was removed meanwhile."""
        root, *links = self.links(base) or [base]
        file = self._store.weights(root) if root else self._initial.file()
        return write_applied(file, [*map(self._store.delta, links), delta], full)

    def _info(self, version: int) -> StoredVersion | None:
        try:
            return self._store.info(version)
        except VersionUnknown:
            return None


def other_weights(info: StoredVersion, checksum: str) -> WeightsRefused:
    return refused(
        f"the delta makes weights with the checksum {checksum} of version {info.base}, and {info.checksum} is expected",
        "checksum",
    )


def unknown(version: int) -> VersionUnknown:
    return VersionUnknown(FieldProblem(field="version", message="it is not stored here, or no longer", value=version))


def refused(message: str, field: str = "weights") -> WeightsRefused:
    return WeightsRefused(FieldProblem(field=field, message=message.removesuffix(".")))
