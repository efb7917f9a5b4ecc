"""A scripted stand-in for the policy store client: keeps the bytes of one upload and notes every call."""

from typing import Any

from deployments.protocols.weight_versions import CurrentVersions
from rollout_client.contract.policy import (
    PolicyLayout,
    PolicyState,
    PolicyUpdate,
    PushOptions,
    SwitchOptions,
    TensorLayout,
    UploadState,
    VersionInfo,
)

SENDER = "the sender"
UPDATE = PolicyUpdate(version=7, checksum="c" * 64, replicas=[])


class ScriptedStore:
    """Keeps the bytes of one upload; `failures` says what a method raises, `current` what is current."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.arrived = bytearray()
        self.failures: dict[str, Exception] = {}
        self.repeated: PolicyUpdate | None = None
        self.current = 3
        """Of the last chunk that was begun."""

    def note(self, method: str, *arguments: Any) -> None:
        self.calls.append((method, *arguments))
        if method in self.failures:
            raise self.failures[method]

    def named(self, method: str) -> list[tuple[Any, ...]]:
        """The arguments of each call of `method`."""
        return [call[1:] for call in self.calls if call[0] == method]

    async def wait_for(
        self,
        name: str | None,
        min_version: int,
        version: int | None,
        wait_s: float | None,
        takes_offered: bool = False,
    ) -> CurrentVersions:
        self.note("wait_for", name, min_version, version, wait_s)
        return CurrentVersions("store", 1, {"": self.current, "run-b": self.current})

    async def drop_policy(self, name: str) -> None:
        self.note("drop_policy", name)

    async def state(self, checksums_within_s: float) -> PolicyState:
        self.note("state", checksums_within_s)
        info = VersionInfo(version=0, kind="initial")
        return PolicyState(current=self.current, versions=[info], replicas=[], transfer_world_size=1)

    async def layout(self) -> PolicyLayout:
        return PolicyLayout(tensors={"w": TensorLayout(dtype="BF16", shape=[2, 3])})

    async def upload_state(self, version: int, name: str | None = None) -> UploadState:
        self.note("upload_state", version, *given(name))
        return UploadState(version=version, received_bytes=len(self.arrived))

    async def write_chunk(
        self, version: int, sender: str | None, offset: int, data: bytes, name: str | None = None
    ) -> str:
        self.note("write_chunk", version, offset, len(data), *given(name))
        if sender is None:
            del self.arrived[offset:]
        else:
            assert sender == SENDER
        assert len(self.arrived) == offset
        self.arrived += data
        return SENDER

    async def repeated_update(self, version: int, digest: str | None, name: str | None = None) -> PolicyUpdate | None:
        self.note("repeated_update", version, digest, *given(name))
        return self.repeated

    async def complete_upload(
        self, version: int, sender: str, options: PushOptions, is_zstd: bool, digest: str | None
    ) -> PolicyUpdate:
        assert sender == SENDER
        self.note("complete_upload", version, options, is_zstd, digest)
        return UPDATE

    async def load_checkpoint(self, version: int, checkpoint: str, options: PushOptions) -> PolicyUpdate:
        self.note("load_checkpoint", version, checkpoint, options)
        return UPDATE

    async def roll_back(
        self, to: int, version: int | None, options: SwitchOptions, name: str | None = None
    ) -> PolicyUpdate:
        self.note("roll_back", to, version, options, *given(name))
        return UPDATE

    async def init_transfer(self, init_info: dict[str, Any]) -> int:
        self.note("init_transfer", init_info)
        return 3

    async def start_transfer(self, options: SwitchOptions) -> None:
        self.note("start_transfer", options)

    async def update_transfer(self, update_info: Any) -> None:
        self.note("update_transfer", update_info)

    async def finish_transfer(self, version: int | None) -> PolicyUpdate:
        self.note("finish_transfer", version)
        return UPDATE


def given(name: str | None) -> tuple[str, ...]:
    """What a call of a named policy notes besides."""
    return () if name is None else (name,)
