"""A scripted stand-in for the policy store client: keeps the bytes of one upload and notes every call."""

import asyncio
from collections.abc import Awaitable, Callable
from inspect import signature
from typing import Any

from deployments.policy.failures import PolicyUnknown
from deployments.policy.store import PolicyStore
from deployments.protocols.weight_versions import CurrentVersions
from rollout_client.contract.policy import (
    PolicyLayout,
    PolicyState,
    PolicyUpdate,
    TensorLayout,
    UploadState,
    VersionInfo,
)

SENDER = "the sender"
UPDATE = PolicyUpdate(version=7, checksum="c" * 64, replicas=[])
ANSWERS = {
    "layout": PolicyLayout(tensors={"w": TensorLayout(dtype="BF16", shape=[2, 3])}),
    "init_transfer": 3,
    **dict.fromkeys(("complete_upload", "load_checkpoint", "roll_back", "finish_transfer"), UPDATE),
}


class ScriptedStore:
    """Has the methods of the store. `failures` says what one raises, `current` what is current."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.arrived = bytearray()
        self.failures: dict[str, Exception] = {}
        self.answers: dict[str, Any] = dict(ANSWERS)
        self.repeated: PolicyUpdate | None = None
        self.current = 3
        self.policies = {"", "run-b"}
        self.gate = asyncio.Event()
        """`wait_for` answers while it is set."""
        self.gate.set()

    def note(self, method: str, *arguments: Any) -> None:
        self.calls.append((method, *arguments))
        if method in self.failures:
            raise self.failures[method]

    def named(self, method: str) -> list[tuple[Any, ...]]:
        """The arguments of each call of `method`."""
        return [call[1:] for call in self.calls if call[0] == method]

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        takes = signature(getattr(PolicyStore, method))

        async def called(*arguments: Any, **named: Any) -> Any:
            bound = takes.bind(self, *arguments, **named)
            bound.apply_defaults()
            self.note(method, *bound.args[1:])
            return self.repeated if method == "repeated_update" else self.answers.get(method)

        return called

    async def wait_for(self, *demand: Any, takes_offered: bool = False) -> CurrentVersions:
        del takes_offered
        self.note("wait_for", *demand)
        await self.gate.wait()
        if (demand[0] or "") not in self.policies:
            raise PolicyUnknown.of("policy.name", "there is no policy of this name", demand[0])
        return CurrentVersions("store", 1, dict.fromkeys(self.policies, self.current))

    async def state(self, checksums_within_s: float) -> PolicyState:
        self.note("state", checksums_within_s)
        info = VersionInfo(version=0, kind="initial")
        return PolicyState(current=self.current, versions=[info], replicas=[], transfer_world_size=1)

    async def upload_state(self, version: int, name: str | None = None) -> UploadState:
        self.note("upload_state", version, name)
        return UploadState(version=version, received_bytes=len(self.arrived))

    async def write_chunk(self, version: int, sender: str | None, offset: int, data: bytes, name: str | None) -> str:
        self.note("write_chunk", version, offset, len(data), name)
        if sender is None:
            del self.arrived[offset:]
        assert (sender or SENDER, len(self.arrived)) == (SENDER, offset)
        self.arrived += data
        return SENDER
