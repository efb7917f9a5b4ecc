"""A policy store in this process over scripted replicas, in virtual time, and weights to push to it."""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from functools import cache, partial, wraps
from inspect import Parameter, Signature, signature
from itertools import accumulate
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
import zstandard
from safetensors.torch import load, load_file, save, save_file

from deployments.policy import store as store_module
from deployments.policy.commands import StoredFile, StoredKind, VersionPayload
from deployments.policy.failures import PolicyFailure, UpdateUnderWay, VersionRefused
from deployments.policy.policies import Policy
from deployments.policy.settings import PolicySettings
from deployments.policy.store import PolicyStore
from deployments.policy.update import Updates
from deployments.policy.versions import Versions
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.contract.base import FieldProblem
from rollout_client.contract.policy import PolicyUpdate, PushOptions, SwitchOptions, UploadState
from rollout_client.weights.checksum import file_checksum, file_digest
from rollout_client.weights.safetensors_file import NotSafetensors
from tests.deployments.policy.scripted_replicas import ScriptedReplica
from tests.fakes.cluster import ScriptedCluster
from tests.paths import TINY_MODEL
from tests.virtual_time import run, settled, until

ADAPTED, HEAD, NORM = "model.layers.0.self_attn.o_proj", "model.embed_tokens.weight", "model.norm.weight"
TINY = load_file(TINY_MODEL / "model.safetensors")
INITIAL = {name: TINY[name] for name in (f"{ADAPTED}.weight", NORM)} | {HEAD: TINY[HEAD][:8].clone()}
"""The tensors of the store's model: three of the tiny one."""
FOLDER_OF_MODEL = TemporaryDirectory(prefix="model-")
MODEL = Path(FOLDER_OF_MODEL.name)
save_file(INITIAL, MODEL / "model.safetensors")


def weights(scale: float) -> bytes:
    return save({**INITIAL, NORM: INITIAL[NORM] * scale}, {"format": "pt"})


BASE = weights(2.0)


def adapter(value: float = 1.0, module: str = f"base_model.model.{ADAPTED}", rank: int = 2) -> bytes:
    rows, columns = INITIAL[f"{ADAPTED}.weight"].shape
    matrices = {
        f"{module}.lora_A.weight": torch.full((rank, columns), value),
        f"{module}.lora_B.weight": torch.full((rows, rank), value),
    }
    return save(matrices, {"adapter_config": json.dumps({"r": rank})})


def delta(value: float = 9.0, place: int = 3) -> bytes:
    """Sets one value of the norm."""
    gaps, values = torch.tensor([place], dtype=torch.int32), torch.tensor([value]).bfloat16()
    return save({f"{NORM}.gaps": gaps, f"{NORM}.values": values})


def changed(base: bytes, value: float = 9.0, place: int = 3) -> bytes:
    """The weights that `delta` makes of `base`."""
    tensors = load(base)
    tensors[NORM][place] = value
    return save(tensors, {"format": "pt"})


@cache
def checksum_of(content: bytes) -> str:
    """The `Checksum` of a file with this content."""
    with NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return file_checksum(file.name)


def digest_of(content: bytes) -> str | None:
    """The `weights_digest` of a file with this content, or of one that is packed as zstd; `None` if it is none."""
    with NamedTemporaryFile() as file:
        is_packed = content.startswith(zstandard.FRAME_HEADER)
        file.write(zstandard.ZstdDecompressor().decompressobj().decompress(content) if is_packed else content)
        file.flush()
        try:
            return file_digest(file.name)
        except NotSafetensors:
            return None


Push = tuple[bytes, bytes, dict[str, Any]]
"""What is sent, the weights that it makes, and the options."""


def a_delta(value: float, version: int, full: bytes, is_verified: bool = True) -> Push:
    makes = changed(full, value, int(value))
    said = {"checksum": checksum_of(makes)} if is_verified else {}
    return delta(value, int(value)), makes, {"kind": "delta", "base": version, **said}


PUSHES: dict[str, Callable[[float, int, bytes], Push]] = {
    "full": lambda value, _, __: (weights(value), weights(value), {}),
    "delta": a_delta,
    "unverified delta": partial(a_delta, is_verified=False),
    "partial": lambda value, version, full: (
        save({HEAD: INITIAL[HEAD] * value}),
        save(load(full) | {HEAD: INITIAL[HEAD] * value}),
        {"kind": "partial", "base": version},
    ),
    "adapter": lambda value, _, __: (adapter(value), adapter(value), {"kind": "adapter"}),
}
"""Pushes by their kinds: each gets a number, and the version and the weights of the full weights that are current."""


class MortalTasks(BackgroundTasks):
    """The tasks of a store that can be killed."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[asyncio.Task[Any]] = []

    def start(self, work: Coroutine[Any, Any, Any], context: Context | None = None) -> asyncio.Task[Any]:
        self.started.append(super().start(work, context))
        return self.started[-1]

    async def die(self) -> None:
        for task in self.started:
            task.cancel()
        await self.ended()
        await settled_threads()


async def settled_threads() -> None:
    """Lets everything go on that can without time passing, threads too: no time passes before they have ended."""
    await asyncio.sleep(0.001)


class World:
    """A store over a folder, and the replicas that have registered."""

    def __init__(self, folder: Path, model: Path = MODEL, **settings: Any) -> None:
        self.folder = folder
        self.model = model
        self.settings = {"transfer": {"trainers": ["10.0.0.4:29500"]}} | settings
        self.cluster = ScriptedCluster()
        self.replicas: list[ScriptedReplica] = []
        self.senders: dict[tuple[int, str | None], str] = {}
        self.store = self.another_store()

    def another_store(self) -> PolicyStore:
        settings = PolicySettings(folder=str(self.folder), **self.settings)
        self.tasks = MortalTasks()
        with patch.object(store_module, "BackgroundTasks", lambda: self.tasks):
            return PolicyStore(settings, str(self.model), cluster=self.cluster)

    async def restart(self, is_folder_lost: bool = False) -> None:
        """The store dies with all that it did, and the replicas register with its successor as they are.

        One that carries out a command registers after it.
        """
        await self.tasks.die()
        if is_folder_lost:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.store = self.another_store()
        for replica in filter(lambda each: each.is_alive, self.replicas):
            replica.store = self.store
            if not replica.is_busy:
                await replica.register()

    @property
    def policy(self) -> Policy:
        """The policy without a name."""
        return self.store.policies.unnamed

    @property
    def versions(self) -> Versions:
        """Those of the policy without a name."""
        return self.policy.versions

    async def replica(self, name: str, **fields: Any) -> ScriptedReplica:
        replica = ScriptedReplica(name, self.store, self.cluster, **fields)
        held = (self.versions.find(version or 0) for version in (replica.loaded.full, replica.loaded.adapter))
        replica.keys = {info.version: info.key for info in held if info is not None}
        self.replicas.append(replica)
        return await replica.start()

    async def ready(self, name: str, **fields: Any) -> ScriptedReplica:
        """A replica that accepts requests."""
        replica = await self.replica(name, **fields)
        await until(lambda: replica.accepts_requests)
        return replica

    async def upload(self, version: int, content: bytes, name: str | None = None) -> UploadState:
        return await self.chunk(version, 0, content, name)

    async def chunk(self, version: int, first: int, content: bytes, name: str | None = None) -> UploadState:
        self.senders[version, name] = await self.store.write_chunk(version, None, first, content, name)
        return await self.store.upload_state(version, name)

    async def complete(
        self, version: int, options: PushOptions, is_zstd: bool = False, digest: str | None = None
    ) -> PolicyUpdate:
        return await self.store.complete_upload(version, self.senders[version, options.name], options, is_zstd, digest)

    async def push(self, version: int, content: bytes, is_zstd: bool = False, **options: Any) -> PolicyUpdate:
        await self.upload(version, content, options.get("name"))
        return await self.complete(version, PushOptions(**options), is_zstd, digest_of(content))

    def pushing(self, version: int, content: bytes, **options: Any) -> asyncio.Task[PolicyUpdate]:
        return asyncio.create_task(self.push(version, content, **options))

    async def until_updating(self, version: int) -> None:
        await until(lambda: self.versions.updating_to == version)

    async def updating(self, version: int, content: bytes) -> asyncio.Task[PolicyUpdate]:
        """A push whose weights the replicas are loading."""
        pushing = self.pushing(version, content)
        await self.until_updating(version)
        return pushing

    @property
    def is_busy(self) -> bool:
        """Whether an update or a transfer is under way."""
        try:
            self.store.registry.update_lock.refuse_if_busy(SwitchOptions(if_busy="refuse"))
        except UpdateUnderWay:
            return True
        return False

    async def until_idle(self) -> None:
        await until(lambda: not self.is_busy)

    async def end(self) -> None:
        for replica in self.replicas:
            replica.end()
        await settled()

    def files(self) -> set[str]:
        """The files of the store, except run.json and those that were discarded: a thread deletes them some time."""
        found = set[str]()
        for folder, folders, files in os.walk(self.folder):
            # What is in it may vanish while it is read.
            if "removing" in folders:
                folders.remove("removing")
            found.update(str((Path(folder) / file).relative_to(self.folder)) for file in files)
        return found - {"run.json"}


def play(story: Callable[[World], Coroutine[Any, Any, None]], folder: Path, **settings: Any) -> None:
    async def whole() -> None:
        world = World(folder / "policy", **settings)
        try:
            await story(world)
        finally:
            await world.end()

    run(whole())


Story = Callable[..., Coroutine[Any, Any, None]]


def in_world(**settings: Any) -> Callable[[Story], Callable[..., None]]:
    """Plays a test, whose first parameter is `world`, in virtual time over a store with these settings."""

    def decorate(test: Story) -> Callable[..., None]:
        fixtures = list(signature(test).parameters.values())[1:]
        wants_path = any(fixture.name == "tmp_path" for fixture in fixtures)

        @wraps(test)
        def run_test(tmp_path: Path, **named: Any) -> None:
            given = {**named, "tmp_path": tmp_path} if wants_path else named
            play(lambda world: test(world, **given), tmp_path, **settings)

        folder = [] if wants_path else [Parameter("tmp_path", Parameter.KEYWORD_ONLY)]
        run_test.__signature__ = Signature([*fixtures, *folder])  # type: ignore[attr-defined]
        return run_test

    return decorate


@asynccontextmanager
async def refused(failure: type[PolicyFailure], field: str, message: str, value: Any = None) -> AsyncIterator[None]:
    with pytest.raises(failure) as raised:
        yield
    assert raised.value.problems == (FieldProblem(field=field, message=message, value=value),)


def taken(version: int, newest: int) -> Any:
    message = f"versions are numbered upward and {newest} is taken; the next is {newest + 1}"
    return refused(VersionRefused, "version", message, version)


def content_of(payload: VersionPayload | None) -> bytes:
    assert payload is not None
    return Path(payload.file.path).read_bytes()


def a_payload(version: int, kind: StoredKind = "full", adapter_config: str | None = None) -> VersionPayload:
    """The payload of a file that does not exist."""
    file = StoredFile(f"/policy/versions/{version}/weights.safetensors", "node", inode=1, modified_ns=1)
    return VersionPayload(version, kind, 10, "checksum", file, adapter_config=adapter_config)


def full_weights(count: int) -> list[bytes]:
    """The weights of version 1, and of those that `push_deltas` makes of it."""
    return [*accumulate(range(1, count), lambda base, step: changed(base, float(step), step), initial=BASE)]


async def push_deltas(world: World, count: int, first: int = 2) -> list[PolicyUpdate]:
    """Versions from `first` on, each a delta of the one before it."""
    updates = []
    for version, base in enumerate(full_weights(first + count - 2)[first - 2 :], first):
        content, _, options = a_delta(version - 1, version - 1, base)
        updates.append(await world.push(version, content, **options))
    return updates


async def fleet(world: World, *names: str) -> Sequence[ScriptedReplica]:
    """Replicas that have version 1."""
    replicas = [await world.ready(name) for name in names]
    await world.push(1, BASE)
    return replicas


async def nothing(_: Updates) -> None:
    """Writes no full weights, as if the store had no time yet."""


def version_files(world: World) -> dict[int, set[str]]:
    """The ends of the names of the files of each stored version."""
    return {
        version: {path.name.removeprefix(f"{version}") for path in world.folder.glob(f"versions/{version}.*")}
        for version in versions(world)
    }


WHOLE, DELTA = {".safetensors"}, {".delta.safetensors"}


def versions(world: World) -> list[int]:
    return [stored.version for stored in world.versions.all]
