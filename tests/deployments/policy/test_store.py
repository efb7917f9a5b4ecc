"""The policy store in this process, over scripted replicas: versions, updates that meet, replicas that come late."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from safetensors.torch import load_file, save, save_file

from deployments.policy.commands import LoadedWeights, VersionPayload
from deployments.policy.failures import (
    ChunkDamaged,
    ChunkMisplaced,
    PolicyFailure,
    PolicyNotCurrent,
    SourceRefused,
    TransferRefused,
    UpdateUnderWay,
    VersionRefused,
    VersionUnknown,
    WeightsRefused,
)
from deployments.policy.settings import PolicySettings
from deployments.policy.store import PolicyStore
from deployments.policy.upload_store import UploadStore
from deployments.policy.uploads import OVERTAKEN
from deployments.policy.version_store import StoredVersion, VersionStore
from rollout_client.policy_contract import PolicyUpdate, PushOptions, SwitchOptions, UploadState
from rollout_client.problem_contract import FieldProblem
from rollout_client.weights.checksum import file_checksum
from tests.deployments.policy.scripted_replicas import ScriptedCluster, ScriptedReplica, Step
from tests.paths import TINY_MODEL
from tests.virtual_time import now, run, settled, until

NORM = "model.norm.weight"
INITIAL = load_file(TINY_MODEL / "model.safetensors")


def weights(scale: float) -> bytes:
    return save({**INITIAL, NORM: INITIAL[NORM] * scale}, {"format": "pt"})


def adapter(value: float = 1.0) -> bytes:
    return save({"lora_A": torch.full((2,), value)}, {"adapter_config": '{"r": 2}'})


def delta() -> bytes:
    changes = {f"{NORM}.gaps": torch.tensor([3], dtype=torch.int32), f"{NORM}.values": torch.tensor([9.0]).bfloat16()}
    return save(changes)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class World:
    """A store over a folder, and the replicas that have joined it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.settings = settings
        self.cluster = ScriptedCluster()
        self.replicas: list[ScriptedReplica] = []
        self.senders: dict[int, str] = {}
        self.store = self.another_store()

    def another_store(self, model: Path = TINY_MODEL) -> PolicyStore:
        settings = PolicySettings(folder=str(self.folder), **self.settings)
        return PolicyStore(settings, str(model), self.cluster)

    async def restart(self) -> None:
        """The store dies, and replicas join the one in its place as they are."""
        self.store = self.another_store()
        for replica in self.replicas:
            replica.store = self.store
            await replica.register()

    @property
    def version_store(self) -> VersionStore:
        return VersionStore(self.folder)

    async def replica(
        self, name: str, *script: Step, loaded: LoadedWeights | None = None, command_s: float = 0.0
    ) -> ScriptedReplica:
        replica = ScriptedReplica(name, self.store, self.cluster, script, loaded or LoadedWeights(), command_s)
        self.replicas.append(replica)
        return await replica.start()

    async def upload(self, version: int, content: bytes) -> UploadState:
        return await self.piece(version, 0, content, len(content))

    async def piece(self, version: int, first: int, content: bytes, total: int) -> UploadState:
        sender = self.senders[version] = await self.store.begin_chunk(version, first)
        await self.store.write_chunk(version, sender, first, content)
        return await self.store.end_chunk(version, sender, first + len(content), total)

    async def complete(
        self, version: int, options: PushOptions, is_zstd: bool = False, digest: str | None = None
    ) -> PolicyUpdate:
        return await self.store.complete_upload(version, self.senders[version], options, is_zstd, digest)

    async def push(self, version: int, content: bytes, is_zstd: bool = False, **options: Any) -> PolicyUpdate:
        await self.upload(version, content)
        return await self.complete(version, PushOptions(**options), is_zstd, sha256(content))

    def pushing(self, version: int, content: bytes, **options: Any) -> asyncio.Task[PolicyUpdate]:
        return asyncio.create_task(self.push(version, content, **options))

    async def until_updating(self, version: int) -> None:
        await until(lambda: self.store._versions.updating_to == version)

    async def until_one_waits(self) -> None:
        """For an update that is under way."""
        await until(lambda: len(self.store._update_lock._lock._waiters or ()) == 1)

    async def end(self) -> None:
        for replica in self.replicas:
            replica.end()
        await settled()

    def files(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}


def play(story: Callable[[World], Coroutine[Any, Any, None]], folder: Path, **settings: Any) -> None:
    async def whole() -> None:
        world = World(folder / "policy", **settings)
        try:
            await story(world)
        finally:
            await world.end()

    run(whole())


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
    return b"".join(payload.chunks)


def versions(world: World) -> list[int]:
    return [stored.version for stored in world.version_store.versions()]


# One update


def test_a_replica_takes_calls_at_once_where_the_initial_weights_are_current(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        replica = await world.replica("r0")
        await until(lambda: replica.accepts_requests)
        assert world.cluster.events == [("r0", "take calls", 0)]
        assert world.cluster.puts == []
        assert not (world.folder / "versions").exists()

    play(story, tmp_path)


def test_new_weights_reach_every_replica_and_are_current(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        replicas = [await world.replica(name) for name in ("r0", "r1")]
        content = weights(2.0)
        update = await world.push(5, content, mode="wait")
        checksum = file_checksum(world.version_store.weights(5))
        assert (update.version, update.checksum) == (5, checksum)
        assert [(replica.replica_id, replica.status) for replica in update.replicas] == [
            ("r0", "swapped"),
            ("r1", "swapped"),
        ]
        assert [content_of(replica.staged) == content for replica in replicas] == [True, True]
        assert world.cluster.puts == [content]
        assert world.cluster.done("swap") == [("r0", 5), ("r1", 5)]
        state = await world.store.state(0)
        assert (state.current, state.updating_to, state.transfer_world_size) == (5, None, 3)
        assert [(replica.replica_id, replica.version) for replica in state.replicas] == [("r0", 5), ("r1", 5)]
        initial, stored = state.versions
        assert (initial.version, initial.kind) == (0, "initial")
        assert (stored.version, stored.kind, stored.base, stored.checksum) == (5, "full", None, checksum)
        assert stored.size_bytes == len(content)
        assert world.files() == {"current.json", "versions/5/info.json", "versions/5/weights.safetensors"}

    play(story, tmp_path)


def test_the_layout_is_that_of_the_model(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        layout = await world.store.layout()
        assert layout.tensors.keys() == INITIAL.keys()
        assert (layout.tensors[NORM].dtype, layout.tensors[NORM].shape) == ("BF16", [128])

    play(story, tmp_path)


def test_an_upload_may_be_compressed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        replica = await world.replica("r0")
        packed = zstandard.compress(weights(2.0))
        await world.push(1, packed, is_zstd=True)
        assert content_of(replica.staged) == weights(2.0)
        assert world.version_store.info(1).upload_digest == sha256(packed)
        assert not list(world.folder.glob("uploads/*"))

    play(story, tmp_path)


def bad(how: str) -> bytes:
    if how == "nan":
        return weights(float("nan"))
    if how == "missing":
        return save({name: tensor for name, tensor in INITIAL.items() if name != NORM})
    return weights(1.0)[:-1]


@pytest.mark.parametrize(("how", "field"), [("nan", NORM), ("missing", NORM), ("cut", "weights")])
def test_bad_weights_leave_everything_as_it_was_and_nothing_is_ordered(tmp_path: Path, how: str, field: str) -> None:
    async def story(world: World) -> None:
        replica = await world.replica("r0")
        await world.push(1, weights(2.0))
        orders, files = list(replica.taken), world.files()
        with pytest.raises(WeightsRefused) as raised:
            await world.push(2, bad(how))
        assert [problem.field for problem in raised.value.problems] == [field]
        state = await world.store.state(0)
        assert (state.current, state.updating_to, replica.taken, world.files()) == (1, None, orders, files)
        with pytest.raises(VersionUnknown):
            await world.store.upload_state(2)
        # The number is free again.
        assert (await world.push(2, weights(3.0))).version == 2

    play(story, tmp_path)


def test_weights_that_the_engines_cannot_take_leave_everything_as_it_was(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        replica = await world.replica("r0", "ok", "error")
        await until(lambda: replica.accepts_requests)
        async with refused(WeightsRefused, "weights", "the engine cannot take them: OSError: r0 has no room"):
            await world.push(1, weights(2.0))
        assert (world.version_store.current(), versions(world), replica.loaded) == (0, [], LoadedWeights())
        assert world.cluster.killed == []
        assert (await world.push(1, weights(2.0))).replicas[0].status == "swapped"

    play(story, tmp_path)


def test_an_upload_that_was_damaged_is_dropped(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        content = weights(2.0)
        await world.upload(1, content)
        message = f"what arrived has {sha256(content)}; send it anew"
        async with refused(ChunkDamaged, "repr-digest", message, "0" * 64):
            await world.complete(1, PushOptions(), False, "0" * 64)
        with pytest.raises(VersionUnknown):
            await world.store.upload_state(1)

    play(story, tmp_path)


def test_a_replica_that_fails_is_replaced_and_the_one_in_its_place_begins_with_the_new_weights(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.replica("r0")
        await world.replica("r1", "ok", "ok", "error")
        await until(lambda: len(world.cluster.done("take calls")) == 2)
        update = await world.push(1, weights(2.0))
        assert [(replica.replica_id, replica.status) for replica in update.replicas] == [
            ("r0", "swapped"),
            ("r1", "replaced"),
        ]
        assert world.cluster.killed == ["r1"]
        young = await world.replica("r2")
        await until(lambda: young.accepts_requests)
        assert young.loaded == LoadedWeights(1)

    play(story, tmp_path)


def test_an_update_goes_on_when_its_caller_goes_away(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.replica("r0", command_s=5.0)
        pushing = world.pushing(1, weights(2.0))
        await world.until_updating(1)
        pushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pushing
        assert await world.store.wait_for(1, None, 60.0) == 1
        assert world.cluster.done("swap") == [("r0", 1)]

    play(story, tmp_path)


# Numbers


def test_versions_are_numbered_upward(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.push(5, weights(2.0))
        for version in (5, 4, 1):
            async with taken(version, newest=5):
                await world.store.begin_chunk(version, 0)
            async with taken(version, newest=5):
                await world.store.load_checkpoint(version, "/", PushOptions())
        assert (await world.push(9, weights(3.0))).version == 9

    play(story, tmp_path)


def test_a_number_is_taken_while_its_update_is_under_way(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.replica("r0", command_s=5.0)
        pushing = world.pushing(5, weights(2.0))
        await world.until_updating(5)
        async with taken(4, newest=5):
            await world.store.begin_chunk(4, 0)
        await world.store.begin_chunk(6, 0)
        assert (await pushing).version == 5

    play(story, tmp_path)


def test_the_same_upload_again_is_answered_again_and_others_are_refused(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.replica("r0")
        content = weights(2.0)
        update = await world.push(3, content)
        assert await world.store.repeated_update(3, sha256(content)) == update
        for version, digest in ((3, sha256(weights(3.0))), (3, None), (4, sha256(content)), (2, sha256(content))):
            assert await world.store.repeated_update(version, digest) is None
        await world.restart()
        without_replicas = PolicyUpdate(version=3, checksum=update.checksum, replicas=[])
        assert await world.store.repeated_update(3, sha256(content)) == without_replicas
        await world.push(4, weights(3.0))
        assert await world.store.repeated_update(3, sha256(content)) == without_replicas

    play(story, tmp_path)


def test_two_senders_of_one_version_never_mix(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        first, second = weights(2.0), weights(3.0)
        overtaken = await world.store.begin_chunk(1, 0)
        await world.store.write_chunk(1, overtaken, 0, first[:1000])
        await world.upload(1, second)

        async def too_late() -> None:
            async with refused(ChunkMisplaced, "content-range", OVERTAKEN):
                await world.store.write_chunk(1, overtaken, 1000, first[1000:])
            async with refused(ChunkMisplaced, "content-range", OVERTAKEN):
                await world.store.end_chunk(1, overtaken, len(first), len(first))
            async with refused(ChunkMisplaced, "content-range", OVERTAKEN):
                await world.store.complete_upload(1, overtaken, PushOptions(), False, None)

        await too_late()
        completing = asyncio.create_task(world.complete(1, PushOptions()))
        await asyncio.sleep(0)
        async with refused(ChunkMisplaced, "content-range", OVERTAKEN):
            await world.store.write_chunk(1, world.senders[1], 0, first)
        await completing
        assert world.version_store.weights(1).read_bytes() == second

    play(story, tmp_path)


@pytest.mark.parametrize("is_zstd", [False, True])
def test_what_is_larger_than_weights_can_be_is_refused_and_leaves_nothing(tmp_path: Path, is_zstd: bool) -> None:
    async def story(world: World) -> None:
        content = bytes(110_000_000)
        with pytest.raises(WeightsRefused, match="more than weights of this model can be"):
            await world.push(1, zstandard.compress(content) if is_zstd else content, is_zstd)
        assert world.files() == set()

    play(story, tmp_path)


IS_ACTIVE = "all of it has arrived, and it is being validated and loaded by the replicas"


def test_the_same_upload_again_while_it_is_under_way_has_the_same_answer(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.replica("r0", command_s=5.0)
        await world.replica("r1", command_s=5.0)
        await until(lambda: len(world.cluster.done("take calls")) == 2)
        content = weights(2.0)
        await world.upload(3, content)
        completing = asyncio.create_task(world.complete(3, PushOptions(), False, sha256(content)))
        await asyncio.sleep(0)
        for is_later in (False, True):
            if is_later:
                await until(lambda: bool(world.cluster.done("stage")))
            else:
                # It is still being checked: nothing may touch what arrived.
                async with refused(VersionRefused, "version", IS_ACTIVE, 3):
                    await world.store.begin_chunk(3, 0)
            async with refused(VersionRefused, "version", IS_ACTIVE, 3):
                await world.complete(3, PushOptions(), False, sha256(content))
            assert await world.store.repeated_update(3, sha256(b"other")) is None
            assert await world.store.repeated_update(3, None) is None
        again = asyncio.create_task(world.store.repeated_update(3, sha256(content)))
        update = await completing
        assert await again == update
        assert [replica.status for replica in update.replicas] == ["swapped", "swapped"]
        assert len(world.cluster.done("swap")) == 2

    play(story, tmp_path)


def test_the_same_bad_upload_again_while_it_is_checked_has_the_same_answer(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        content = bad("nan")
        completing = world.pushing(1, content)
        await until(lambda: 1 in world.store._active_pushes)
        with pytest.raises(WeightsRefused):
            await world.store.repeated_update(1, sha256(content))
        with pytest.raises(WeightsRefused):
            await completing
        assert not world.store._active_pushes

    play(story, tmp_path)


# Updates that meet


def test_a_second_update_waits_for_the_first(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for name in ("r0", "r1"):
            await world.replica(name, command_s=5.0)
        await until(lambda: len(world.cluster.done("take calls")) == 2)
        first = world.pushing(1, weights(2.0))
        await world.until_updating(1)
        assert [(await pushing).version for pushing in (first, world.pushing(2, weights(3.0)))] == [1, 2]
        steps = [(what, version) for _, what, version in world.cluster.events[2:]]
        assert steps == [(what, version) for version in (1, 2) for what in ("stage", "stage", "swap", "swap")]

    play(story, tmp_path)


def test_a_second_update_may_be_refused_instead(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.replica("r0", command_s=5.0)
        pushing = world.pushing(1, weights(2.0))
        await world.until_updating(1)
        assert (await world.store.state(0)).updating_to == 1
        message = "version 1 is being loaded by the replicas; wait for it, or say if_busy=wait"
        async with refused(UpdateUnderWay, "if_busy", message, "refuse"):
            await world.push(2, weights(3.0), if_busy="refuse")
        await pushing
        assert (versions(world), world.cluster.done("swap")) == ([1], [("r0", 1)])
        # What had arrived can be completed later.
        content = weights(3.0)
        assert (await world.store.upload_state(2)).received_bytes == len(content)
        update = await world.complete(2, PushOptions(if_busy="refuse"), False, sha256(content))
        assert update.version == 2

    play(story, tmp_path)


def test_an_update_that_is_overtaken_is_refused_and_not_broken(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        replica = await world.replica("r0", command_s=5.0)
        first = world.pushing(1, weights(1.5))
        await world.until_updating(1)
        higher = world.pushing(3, weights(3.0))
        await world.until_one_waits()
        lower = world.pushing(2, weights(2.0))
        await asyncio.gather(first, higher)
        async with taken(2, newest=3):
            await lower
        assert replica.loaded == LoadedWeights(3)
        assert not list(world.folder.glob("uploads/*"))

    play(story, tmp_path)


# Replicas that come late


def test_a_replica_that_starts_is_brought_to_the_current_weights_before_it_takes_calls(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.push(1, weights(2.0))
        replica = await world.replica("r0")
        await until(lambda: replica.accepts_requests)
        assert world.cluster.events == [("r0", "stage", 1), ("r0", "swap", 1), ("r0", "take calls", 1)]
        assert content_of(replica.staged) == weights(2.0)

    play(story, tmp_path)


@pytest.mark.parametrize("moment", ["before", "stage", "swap"])
def test_a_replica_that_joins_during_an_update_ends_at_the_new_weights(tmp_path: Path, moment: str) -> None:
    async def story(world: World) -> None:
        await world.replica("r0", command_s=5.0)
        await until(lambda: world.cluster.done("take calls") == [("r0", 0)])
        pushing = world.pushing(1, weights(2.0))
        if moment == "before":
            await until(lambda: 1 in world.store._active_pushes)
        else:
            await world.until_updating(1)
            await until(lambda: len(world.replicas[0].taken) == (2 if moment == "stage" else 3))
        late = await world.replica("late")
        await pushing
        await until(lambda: late.accepts_requests)
        assert late.loaded == LoadedWeights(1)
        calls = [version for who, what, version in world.cluster.events if (who, what) == ("late", "take calls")]
        assert calls == [0 if moment == "before" else 1]
        assert world.cluster.killed == []

    play(story, tmp_path)


def test_a_replica_with_weights_that_are_not_current_gets_the_initial_ones_back(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        replica = await world.replica("r0", loaded=LoadedWeights(7))
        await until(lambda: replica.accepts_requests)
        assert replica.loaded == LoadedWeights(0)
        (tmp_path / "staged").write_bytes(content_of(replica.staged))
        assert file_checksum(tmp_path / "staged") == file_checksum(TINY_MODEL / "model.safetensors")

    play(story, tmp_path)


def test_a_replica_that_cannot_be_brought_up_is_replaced(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        (tmp_path / "empty").mkdir()
        world.store = world.another_store(tmp_path / "empty")
        await world.replica("r0", loaded=LoadedWeights(7))
        await until(lambda: world.cluster.killed == ["r0"])
        assert (await world.store.state(0)).replicas == []

    play(story, tmp_path)


@pytest.mark.parametrize("step", ["error", "hang"])
def test_a_replica_that_does_not_take_calls_is_replaced_and_holds_nobody_up(tmp_path: Path, step: Step) -> None:
    async def story(world: World) -> None:
        await world.replica("r0", step)
        await until(lambda: world.cluster.killed == ["r0"])
        assert now() <= 31.0
        assert (await world.push(1, weights(2.0))).replicas == []

    play(story, tmp_path, command_timeout_s=30)


def test_a_replica_that_joins_anew_while_an_update_is_under_way_is_not_killed_for_it(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.replica("r0", command_s=5.0)
        pushing = world.pushing(1, weights(2.0))
        await world.until_updating(1)
        await until(lambda: len(world.replicas[0].taken) == 2)
        late = await world.replica("late")
        await late.register()
        await late.register()
        await pushing
        await until(lambda: late.accepts_requests)
        assert (late.loaded, world.cluster.killed) == (LoadedWeights(1), [])

    play(story, tmp_path)


# Adapters


def test_an_adapter_lies_on_top_of_the_current_full_weights(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        replica = await world.replica("r0")
        await world.push(1, weights(2.0))
        await world.push(2, adapter(), kind="adapter")
        assert replica.loaded == LoadedWeights(1, adapter=2)
        assert replica.staged is not None
        assert (replica.staged.kind, replica.staged.adapter_config) == ("adapter", '{"r": 2}')
        stored = world.version_store.info(2)
        assert (stored.kind, stored.base) == ("adapter", 1)
        await world.push(3, adapter(2.0), kind="adapter")
        assert (replica.loaded, world.version_store.info(3).base) == (LoadedWeights(1, adapter=3), 1)
        await world.push(4, weights(3.0))
        assert replica.loaded == LoadedWeights(4)

    play(story, tmp_path)


def test_an_adapter_may_lie_on_top_of_the_initial_weights(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.push(1, adapter(), kind="adapter")
        assert world.version_store.info(1).base == 0
        replica = await world.replica("r0")
        await until(lambda: replica.accepts_requests)
        assert replica.loaded == LoadedWeights(0, adapter=1)
        assert world.cluster.done("stage") == [("r0", 1)]

    play(story, tmp_path)


def test_a_replica_that_comes_late_gets_the_base_and_then_the_adapter(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.push(1, weights(2.0))
        await world.push(2, adapter(), kind="adapter")
        await world.restart()
        replica = await world.replica("r0")
        await until(lambda: replica.accepts_requests)
        assert [(what, version) for _, what, version in world.cluster.events] == [
            ("stage", 1),
            ("swap", 1),
            ("stage", 2),
            ("swap", 2),
            ("take calls", 2),
        ]
        has_base = await world.replica("r1", loaded=LoadedWeights(1))
        await until(lambda: has_base.accepts_requests)
        assert world.cluster.done("stage")[2:] == [("r1", 2)]
        has_an_old_one = await world.replica("r2", loaded=LoadedWeights(0, adapter=2))
        await until(lambda: has_an_old_one.accepts_requests)
        assert world.cluster.done("stage")[3:] == [("r2", 1), ("r2", 2)]

    play(story, tmp_path)


def test_an_adapter_never_lies_on_other_weights_than_its_base(tmp_path: Path) -> None:
    """A replica joins during one update and before the next, which is an adapter."""

    async def story(world: World) -> None:
        await world.replica("r0", command_s=5.0)
        await until(lambda: bool(world.cluster.done("take calls")))
        full = world.pushing(1, weights(2.0))
        await world.until_updating(1)
        await until(lambda: len(world.replicas[0].taken) == 2)
        on_top = world.pushing(2, adapter(), kind="adapter")
        await world.until_one_waits()
        late = await world.replica("late")
        assert [replica.replica_id for replica in (await full).replicas] == ["r0"]
        assert [replica.replica_id for replica in (await on_top).replicas] == ["r0"]
        await until(lambda: late.accepts_requests)
        assert late.loaded == LoadedWeights(1, adapter=2)
        assert [event[1:] for event in world.cluster.events if event[0] == "late"] == [
            ("stage", 1),
            ("swap", 1),
            ("stage", 2),
            ("swap", 2),
            ("take calls", 2),
        ]

    play(story, tmp_path)


# Deltas


def test_a_delta_is_kept_and_served_as_full_weights(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        replica = await world.replica("r0")
        await world.push(1, weights(2.0))
        await world.push(2, delta(), kind="delta", base=1)
        (tmp_path / "staged").write_bytes(content_of(replica.staged))
        served = load_file(tmp_path / "staged")
        expected = INITIAL[NORM] * 2.0
        expected[3] = 9.0
        assert torch.equal(served[NORM], expected)
        stored = world.version_store.info(2)
        assert (stored.kind, stored.base, stored.checksum) == ("delta", 1, file_checksum(tmp_path / "staged"))
        assert stored.size_bytes == world.version_store.weights(2).stat().st_size

    play(story, tmp_path)


def test_a_delta_may_change_the_initial_weights(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        pushes = [world.pushing(version, delta(), kind="delta", base=0) for version in (1, 2, 3)]
        done = await asyncio.gather(*pushes, return_exceptions=True)
        assert isinstance(done[-1], PolicyUpdate)
        assert {type(answer) for answer in done} <= {PolicyUpdate, VersionRefused}
        assert world.version_store.current() == 3

    play(story, tmp_path)


@pytest.mark.parametrize(
    ("options", "failure", "field", "message", "value"),
    [
        ({"kind": "delta"}, WeightsRefused, "base", "a delta must say which version it changes", None),
        ({"kind": "delta", "base": 9}, VersionUnknown, "version", "it is not stored here, or no longer", 9),
        ({"kind": "delta", "base": 2}, WeightsRefused, "base", "the version has no full weights here", 2),
        ({"base": 1}, WeightsRefused, "base", "only a delta has a base, and these weights are full", 1),
        (
            {"kind": "adapter", "base": 1},
            WeightsRefused,
            "base",
            "only a delta has a base, and these weights are adapter",
            1,
        ),
    ],
)
def test_a_base_that_cannot_be_is_refused(
    tmp_path: Path, options: dict[str, Any], failure: type[PolicyFailure], field: str, message: str, value: Any
) -> None:
    async def story(world: World) -> None:
        await world.push(1, weights(2.0))
        await world.push(2, adapter(), kind="adapter")
        async with refused(failure, field, message, value):
            await world.push(3, delta(), **options)
        assert world.version_store.current() == 2

    play(story, tmp_path)


# What is kept


def test_the_newest_full_versions_are_kept_as_bases(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for version in (1, 2, 3):
            await world.push(version, weights(version + 1.0))
        assert versions(world) == [2, 3]
        await world.push(4, delta(), kind="delta", base=3)
        assert versions(world) == [3, 4]
        for version in (5, 6):
            await world.push(version, adapter(version), kind="adapter")
            assert versions(world) == [3, 4, version]

    play(story, tmp_path, keep_versions=2)


def test_the_base_of_the_current_adapter_is_kept(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.push(1, weights(2.0))
        for version in (2, 3, 4):
            await world.push(version, adapter(version), kind="adapter")
        assert versions(world) == [1, 4]
        await world.push(5, weights(3.0))
        assert versions(world) == [5]

    play(story, tmp_path, keep_versions=1)


# A store that died


def test_a_store_over_the_same_folder_goes_on_with_what_was_current(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        old = await world.replica("r0")
        await world.push(7, weights(2.0))
        await world.restart()
        state = await world.store.state(0)
        assert (state.current, [info.version for info in state.versions]) == (7, [0, 7])
        assert await world.store.wait_for(7, 7, 0.0) == 7
        young = await world.replica("r1")
        await until(lambda: young.accepts_requests)
        assert (old.loaded, young.loaded) == (LoadedWeights(7), LoadedWeights(7))
        assert world.cluster.done("stage") == [("r0", 7), ("r1", 7)]
        async with taken(7, newest=7):
            await world.store.begin_chunk(7, 0)

    play(story, tmp_path)


def test_an_upload_goes_on_where_the_store_died(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        content = weights(2.0)
        await world.piece(1, 0, content[:1000], len(content))
        await world.restart()
        assert await world.store.upload_state(1) == UploadState(
            version=1, received_bytes=1000, total_bytes=len(content)
        )
        await world.piece(1, 1000, content[1000:], len(content))
        update = await world.complete(1, PushOptions(), False, sha256(content))
        assert update.checksum == file_checksum(world.version_store.weights(1))

    play(story, tmp_path)


def test_a_version_that_a_store_died_over_was_never_there(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.push(1, weights(2.0))
        # As an update leaves it that dies before it is durable.
        await world.upload(2, weights(3.0))
        info = StoredVersion(version=2, kind="full", created_at=datetime(2026, 1, 1, tzinfo=UTC), upload_digest="d")
        world.version_store.add(info, UploadStore(world.folder).path(2))
        await world.restart()
        state = await world.store.state(0)
        assert (state.current, [info.version for info in state.versions]) == (1, [0, 1])
        with pytest.raises(VersionUnknown):
            await world.store.upload_state(2)
        assert (await world.push(2, weights(3.0))).version == 2

    play(story, tmp_path)


# Demands


def not_current(field: str, how: str, current: int, value: int) -> Any:
    return refused(PolicyNotCurrent, field, f"{how}; version {current} is current", value)


def test_what_is_current_already_is_not_waited_for(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        assert await world.store.wait_for(0, None, 0.0) == 0
        assert await world.store.wait_for(0, 0, None) == 0
        await world.push(3, weights(2.0))
        began = now()
        assert await world.store.wait_for(2, None, None) == 3
        assert await world.store.wait_for(3, 3, 10.0) == 3
        assert now() == began

    play(story, tmp_path)


def test_a_version_that_comes_in_time_is_waited_for(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.replica("r0", command_s=5.0)
        waits = [
            asyncio.create_task(world.store.wait_for(min_version, version, 50.0))
            for min_version, version in ((1, None), (2, None), (0, 2))
        ]
        seen = asyncio.create_task(world.store.watch(0))
        for version in (1, 2):
            await world.push(version, weights(version + 1.0))
        assert await asyncio.gather(*waits) == [1, 2, 2]
        assert await seen in (0, 1)

    play(story, tmp_path)


def test_waiting_ends_with_what_is_current(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.push(3, weights(2.0))
        began = now()
        async with not_current("policy.min_version", "it is not there after 2.5 s", 3, 4):
            await world.store.wait_for(4, None, 2.5)
        assert now() - began == 2.5
        async with not_current("policy.version", "it is not there after 0 s", 3, 5):
            await world.store.wait_for(0, 5, 0.0)
        # No longer than the service allows.
        for wait_s in (None, 1000.0):
            began = now()
            async with not_current("policy.min_version", "it is not there after 7 s", 3, 4):
                await world.store.wait_for(4, None, wait_s)
            assert now() - began == 7.0

    play(story, tmp_path, wait_s=7)


def test_a_version_that_was_passed_by_is_refused_at_once(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.push(3, weights(2.0))
        began = now()
        for version in (0, 2):
            async with not_current("policy.version", "a newer one has taken its place", 3, version):
                await world.store.wait_for(0, version, 60.0)
        assert now() == began
        waiting = asyncio.create_task(world.store.wait_for(0, 4, 60.0))
        await settled()
        await world.push(5, weights(3.0))
        async with not_current("policy.version", "a newer one has taken its place", 5, 4):
            await waiting

    play(story, tmp_path)


def test_whoever_watches_hears_of_a_new_version_or_of_none_after_a_while(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        assert await world.store.watch(None) == 0
        assert now() == 0.0
        assert await world.store.watch(0) == 0
        assert now() == 5.0
        watching = asyncio.create_task(world.store.watch(0))
        await world.push(1, weights(2.0))
        assert await watching == 1

    play(story, tmp_path)


# Checkpoints that the service reads


def test_a_checkpoint_under_a_root_becomes_a_version(tmp_path: Path) -> None:
    names = sorted(INITIAL)
    (tmp_path / "roots" / "step").mkdir(parents=True)
    for number, part in enumerate((names[:20], names[20:])):
        save_file({name: INITIAL[name] for name in part}, tmp_path / "roots" / "step" / f"{number}.safetensors")

    async def story(world: World) -> None:
        replica = await world.replica("r0")
        place = str(tmp_path / "roots" / "step")
        loads = [asyncio.create_task(world.store.load_checkpoint(1, place, PushOptions())) for _ in range(2)]
        first, second = await asyncio.gather(*loads)
        assert first == second
        assert (first.checksum, replica.loaded) == (file_checksum(TINY_MODEL / "model.safetensors"), LoadedWeights(1))
        assert world.version_store.info(1).upload_digest is None
        assert world.files() == {"current.json", "versions/1/info.json", "versions/1/weights.safetensors"}
        assert len(list((tmp_path / "roots" / "step").iterdir())) == 2

    play(story, tmp_path, checkpoint_roots=[str(tmp_path / "roots")])


def test_while_a_checkpoint_is_read_its_number_is_taken(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        loading = asyncio.create_task(world.store.load_checkpoint(1, str(TINY_MODEL), PushOptions()))
        await settled(1)
        async with refused(VersionRefused, "version", IS_ACTIVE, 1):
            await world.store.load_checkpoint(1, str(tmp_path), PushOptions())
        async with refused(VersionRefused, "version", IS_ACTIVE, 1):
            await world.store.begin_chunk(1, 0)
        await loading

    play(story, tmp_path, checkpoint_roots=[str(TINY_MODEL)])


def test_a_checkpoint_outside_the_roots_is_refused(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        with pytest.raises(SourceRefused, match="none is configured"):
            await world.store.load_checkpoint(1, str(TINY_MODEL), PushOptions())
        assert world.files() == set()

    play(story, tmp_path)


def test_an_adapters_folder_may_be_read_too(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file({"lora_A": torch.ones(2)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"r": 4}')

    async def story(world: World) -> None:
        await world.store.load_checkpoint(1, str(folder), PushOptions(kind="adapter"))
        stored = world.version_store.info(1)
        assert (stored.kind, stored.adapter_config) == ("adapter", '{"r": 4}')

    play(story, tmp_path, checkpoint_roots=[str(tmp_path)])


# Transfers


async def transferring(world: World, *names: str) -> Sequence[ScriptedReplica]:
    replicas = [await world.replica(name) for name in names]
    await until(lambda: all(replica.accepts_requests for replica in replicas))
    assert await world.store.init_transfer({"world_size": 1 + len(names)}) == 1 + len(names)
    await world.store.start_transfer(SwitchOptions())
    return replicas


def test_a_transfer_that_is_finished_is_current_and_has_no_weights_here(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        replicas = await transferring(world, "r0", "r1")
        await world.store.update_transfer("tensors")
        first, second = await asyncio.gather(
            world.store.finish_transfer(None), world.store.finish_transfer(None), return_exceptions=True
        )
        assert isinstance(first, PolicyUpdate)
        assert isinstance(second, TransferRefused)
        assert (first.version, first.checksum, versions(world)) == (1, None, [1])
        assert [replica.loaded for replica in replicas] == [LoadedWeights(1)] * 2
        # One that comes late waits for weights that are here.
        late = await world.replica("late")
        await settled()
        assert not late.accepts_requests
        await world.push(2, weights(2.0))
        assert (late.accepts_requests, late.loaded) == (True, LoadedWeights(2))

    play(story, tmp_path)


def test_during_a_transfer_other_updates_wait_or_are_refused(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await transferring(world, "r0")
        message = "a trainer is sending weights to the replicas; wait for it, or say if_busy=wait"
        async with refused(UpdateUnderWay, "if_busy", message, "refuse"):
            await world.push(5, weights(2.0), if_busy="refuse")
        async with refused(UpdateUnderWay, "if_busy", message, "refuse"):
            await world.store.start_transfer(SwitchOptions(if_busy="refuse"))
        pushing = world.pushing(5, weights(2.0))
        await world.until_one_waits()
        await world.store.finish_transfer(3)
        assert (await pushing).version == 5

    play(story, tmp_path)


def test_a_trainer_that_is_not_heard_of_any_more_is_given_up(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await transferring(world, "r0")
        pushing = world.pushing(1, weights(2.0))
        assert (await pushing).replicas == []
        assert world.cluster.killed == ["r0"]
        with pytest.raises(TransferRefused, match="none is under way"):
            await world.store.finish_transfer(None)

    play(story, tmp_path, transfer_idle_s=30)


def test_a_transfer_whose_end_cannot_be_made_durable_is_still_given_up_in_time(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await transferring(world, "r0")
        world.folder.mkdir()
        (world.folder / "making").write_bytes(b"in the way")
        with pytest.raises(OSError, match="making"):
            await world.store.finish_transfer(None)
        (world.folder / "making").unlink()
        assert (await world.push(1, weights(2.0))).version == 1
        assert world.cluster.killed == ["r0"]

    play(story, tmp_path, transfer_idle_s=30)
