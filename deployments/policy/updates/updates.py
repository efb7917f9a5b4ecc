"""What a push does with a validated version: `Updater` for the policy without a name, `NamedUpdater` for the others."""

from pathlib import Path
from typing import Protocol

from deployments.policy.versions.version_store import StoredVersion
from rollout_client.policy_contract import PolicyUpdate, PushOptions


class Updates(Protocol):
    def refuse(self, version: int, options: PushOptions) -> None:
        """Raises what `update` would raise at once, for callers that have to prepare the version first."""
        ...

    async def update(self, info: StoredVersion, file: Path, options: PushOptions) -> PolicyUpdate:
        """Makes the version current and returns once every replica serves it; raises `PolicyFailure`."""
        ...
