"""The policy store over its Serve handle, for replicas and for the ingress: the client of `store.PolicyStore`."""

from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.failures import PolicyStoreLost
from deployments.policy.replicas.commands import (
    CommandReport,
    CommandSource,
    LoadedWeights,
    NumberedCommand,
    ReplicaRegistration,
)
from deployments.policy.versions.current_version import NamedVersions
from deployments.rpc.handle_calls import call_result
from rollout_client.contract.policy import (
    PolicyLayout,
    PolicyState,
    PolicyUpdate,
    PushOptions,
    SwitchOptions,
    UploadState,
)


class PolicyStoreClient(CommandSource):
    """Has the methods of `PolicyStore`.

    Each raises what the store raises, and `PolicyStoreLost` if the store dies or cannot be reached.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def register(self, registration: ReplicaRegistration) -> None:
        await self._call("register", registration)

    async def next_command(self, replica_id: str, report: CommandReport | None) -> NumberedCommand | None:
        numbered: NumberedCommand | None = await self._call("next_command", replica_id, report)
        return numbered

    async def record_checksum(self, replica_id: str, loaded: LoadedWeights, checksum: str) -> None:
        await self._call("record_checksum", replica_id, loaded, checksum)

    async def read_weights(self, version: int, checksum: str, offset: int, count: int) -> bytes:
        data: bytes = await self._call("read_weights", version, checksum, offset, count)
        return data

    async def watch(self, seen: int | None) -> int:
        current: int = await self._call("watch", seen)
        return current

    async def wait_for(self, min_version: int, version: int | None, wait_s: float | None) -> int:
        current: int = await self._call("wait_for", min_version, version, wait_s)
        return current

    async def watch_named(self, seen: NamedVersions | None) -> NamedVersions:
        named: NamedVersions = await self._call("watch_named", seen)
        return named

    async def wait_for_named(
        self, name: str, min_version: int, version: int | None, wait_s: float | None
    ) -> NamedVersions:
        named: NamedVersions = await self._call("wait_for_named", name, min_version, version, wait_s)
        return named

    async def drop_policy(self, name: str) -> None:
        await self._call("drop_policy", name)

    async def state(self, checksums_within_s: float = 0.0) -> PolicyState:
        state: PolicyState = await self._call("state", checksums_within_s)
        return state

    async def layout(self) -> PolicyLayout:
        layout: PolicyLayout = await self._call("layout")
        return layout

    async def upload_state(self, version: int, name: str | None = None) -> UploadState:
        state: UploadState = await self._call("upload_state", version, name)
        return state

    async def begin_chunk(
        self, version: int, first_byte: int, owner: str | None = None, name: str | None = None
    ) -> str:
        sender: str = await self._call("begin_chunk", version, first_byte, owner, name)
        return sender

    async def write_chunk(self, version: int, sender: str, offset: int, data: bytes, name: str | None = None) -> None:
        await self._call("write_chunk", version, sender, offset, data, name)

    async def end_chunk(
        self, version: int, sender: str, end: int, total_bytes: int | None, name: str | None = None
    ) -> UploadState:
        state: UploadState = await self._call("end_chunk", version, sender, end, total_bytes, name)
        return state

    async def repeated_update(self, version: int, digest: str | None, name: str | None = None) -> PolicyUpdate | None:
        update: PolicyUpdate | None = await self._call("repeated_update", version, digest, name)
        return update

    async def complete_upload(
        self, version: int, sender: str, options: PushOptions, is_zstd: bool, digest: str | None
    ) -> PolicyUpdate:
        update: PolicyUpdate = await self._call("complete_upload", version, sender, options, is_zstd, digest)
        return update

    async def load_checkpoint(self, version: int, checkpoint: str, options: PushOptions) -> PolicyUpdate:
        update: PolicyUpdate = await self._call("load_checkpoint", version, checkpoint, options)
        return update

    async def roll_back(self, to: int, version: int | None, options: SwitchOptions) -> PolicyUpdate:
        update: PolicyUpdate = await self._call("roll_back", to, version, options)
        return update

    async def init_transfer(self, init_info: dict[str, Any]) -> int:
        world_size: int = await self._call("init_transfer", init_info)
        return world_size

    async def start_transfer(self, options: SwitchOptions) -> None:
        await self._call("start_transfer", options)

    async def update_transfer(self, update_info: Any) -> None:
        await self._call("update_transfer", update_info)

    async def finish_transfer(self, version: int | None) -> PolicyUpdate:
        update: PolicyUpdate = await self._call("finish_transfer", version)
        return update

    async def _call(self, method: str, *arguments: Any) -> Any:
        response: Any = getattr(self._handle, method).remote(*arguments)
        return await call_result(response, response, PolicyStoreLost, "The policy store")
