"""The versions of one node: fetched once however many replicas ask, mapped where they can be read, and removed."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from deployments.policy.commands import DeltaPayload, StoredFile, VersionPayload
from deployments.policy.node_files import NodeFile, NodeWeights, WeightsNotFetched
from rollout_client.weights.checksum import file_checksum
from tests.deployments.policy.delta_files import delta_of
from tests.deployments.policy.scripted_reads import ScriptedReads
from tests.deployments.policy.weight_files import GOOD


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The file of version 7 in the folder of the policy store."""
    path = tmp_path / "policy" / "weights.safetensors"
    path.parent.mkdir()
    save_file(GOOD, path)
    return path


def payload_of(stored: Path, node_id: str = "store's", version: int = 7, is_copied: bool = False) -> VersionPayload:
    """The payload as the policy store on the node `node_id` makes it."""
    found = stored.stat()
    file = StoredFile(str(stored), node_id, found.st_ino, found.st_mtime_ns, is_copied)
    keep = frozenset({version})
    return VersionPayload(version, "full", found.st_size, file_checksum(stored), file, keep=keep)


def away(payload: VersionPayload) -> VersionPayload:
    """The payload for a node that cannot read the file of the store."""
    return replace(payload, file=replace(payload.file, path="/of/another/machine"))


def node(folder: Path, source: ScriptedReads | None = None, node_id: str = "another") -> NodeWeights:
    """The view of one of the node's replicas; without a source nothing can be fetched."""
    weights = NodeWeights(folder / "node", node_id, (source or ScriptedReads(b"", version=-1)).read)
    weights.join()
    return weights


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "node" / "versions").iterdir())


def names(*payloads: VersionPayload) -> list[str]:
    """The names of the files of a node that holds these versions."""
    return sorted(
        f"{payload.version}-{payload.checksum}{suffix}" for payload in payloads for suffix in (".lock", ".safetensors")
    )


def test_on_the_node_of_the_store_its_own_file_is_mapped(tmp_path: Path, stored: Path) -> None:
    source = ScriptedReads(stored.read_bytes())
    weights = node(tmp_path, source, node_id="store's")
    assert asyncio.run(weights.file_of(payload_of(stored, is_copied=True))) == NodeFile(
        stored, read_bytes=stored.stat().st_size
    )
    assert (source.offsets, files(tmp_path)) == ([], [])


def test_a_node_that_can_read_the_folder_of_the_store_maps_its_file(tmp_path: Path, stored: Path) -> None:
    source = ScriptedReads(stored.read_bytes())
    file = asyncio.run(node(tmp_path, source).file_of(payload_of(stored)))
    assert file == NodeFile(stored, read_bytes=stored.stat().st_size)
    assert source.offsets == []


def test_a_file_of_the_same_path_and_size_that_is_another_one_is_not_mapped(tmp_path: Path, stored: Path) -> None:
    payload = payload_of(stored)
    content = stored.read_bytes()
    shutil.copy2(stored, tmp_path / "copy")
    (tmp_path / "copy").rename(stored)
    file = asyncio.run(node(tmp_path, ScriptedReads(content)).file_of(payload))
    assert (file.path.parent.name, file.fetched_bytes) == ("versions", len(content))


def test_a_node_may_be_told_to_copy_what_it_could_read(tmp_path: Path, stored: Path) -> None:
    file = asyncio.run(node(tmp_path, ScriptedReads(stored.read_bytes())).file_of(payload_of(stored, is_copied=True)))
    assert file.path != stored
    assert load_file(file.path).keys() == GOOD.keys()


def test_the_replicas_of_a_node_fetch_a_version_once_and_map_one_file(tmp_path: Path, stored: Path) -> None:
    source, payload = ScriptedReads(stored.read_bytes()), away(payload_of(stored))

    async def play() -> Sequence[NodeFile]:
        return await asyncio.gather(*(node(tmp_path, source).file_of(payload) for _ in range(3)))

    found = asyncio.run(play())
    assert len({file.path for file in found}) == 1
    assert sorted(file.fetched_bytes for file in found) == [0, 0, payload.size_bytes]
    assert source.offsets == [0]
    assert files(tmp_path) == names(payload)
    assert asyncio.run(node(tmp_path).file_of(payload)) == NodeFile(found[0].path), "a replica that comes later"


def test_while_another_process_fetches_a_version_the_replica_waits_for_it(tmp_path: Path, stored: Path) -> None:
    payload = away(payload_of(stored))
    final = tmp_path / "node" / "versions" / names(payload)[1]
    weights = node(tmp_path)

    async def play() -> NodeFile:
        waiting = asyncio.create_task(weights.file_of(payload))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        shutil.copy(stored, final)
        fetching.kill()
        return await waiting

    command = [sys.executable, "-c", HOLDS_LOCK, str(final.with_suffix(".lock"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as fetching:
        assert fetching.stdout is not None
        fetching.stdout.readline()
        assert asyncio.run(play()) == NodeFile(final)


HOLDS_LOCK = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_what_a_process_had_fetched_when_it_died_is_fetched_anew(tmp_path: Path, stored: Path) -> None:
    payload = away(payload_of(stored))
    weights = node(tmp_path, ScriptedReads(stored.read_bytes()))
    final = tmp_path / "node" / "versions" / names(payload)[1]
    final.with_suffix(".fetching").write_bytes(b"longer than the whole file" * 100)
    assert asyncio.run(weights.file_of(payload)).path.read_bytes() == stored.read_bytes()
    assert files(tmp_path) == names(payload)


@pytest.mark.parametrize("damaged", [-1, 9], ids=["data", "header"])
def test_damaged_bytes_are_no_version(tmp_path: Path, stored: Path, damaged: int) -> None:
    content = bytearray(stored.read_bytes())
    content[damaged] ^= 0xFF
    with pytest.raises(WeightsNotFetched, match="What was fetched as version 7 has another checksum"):
        asyncio.run(node(tmp_path, ScriptedReads(bytes(content))).file_of(away(payload_of(stored))))
    assert [name for name in files(tmp_path) if not name.endswith(".lock")] == []


def test_versions_that_nobody_needs_leave_the_node_when_another_one_comes(tmp_path: Path, stored: Path) -> None:
    old, current, new = (away(payload_of(stored, version=version)) for version in (5, 6, 7))
    source = ScriptedReads(stored.read_bytes())

    async def play() -> None:
        for payload, keep in ((old, {5}), (current, {5, 6}), (new, {6, 7})):
            source.version = payload.version
            await node(tmp_path, source).file_of(replace(payload, keep=frozenset(keep)))

    asyncio.run(play())
    assert files(tmp_path) == names(current, new)


def test_a_version_that_is_being_fetched_is_not_removed(tmp_path: Path, stored: Path) -> None:
    old, new = (away(payload_of(stored, version=version)) for version in (6, 7))
    weights = node(tmp_path, ScriptedReads(stored.read_bytes()))
    being_fetched = tmp_path / "node" / "versions" / names(old)[1]
    being_fetched.with_suffix(".fetching").touch()
    with FileLock(being_fetched.with_suffix(".lock")):
        asyncio.run(weights.file_of(new))
        assert being_fetched.with_suffix(".fetching").exists()
    asyncio.run(weights.file_of(new))
    assert files(tmp_path) == names(new)


def test_the_last_replica_that_leaves_a_node_removes_its_versions(tmp_path: Path, stored: Path) -> None:
    weights = node(tmp_path, ScriptedReads(stored.read_bytes()))
    payload = away(payload_of(stored))
    file = asyncio.run(weights.file_of(payload)).path
    another = tmp_path / "node" / "replicas" / str(os.getppid())
    another.mkdir()
    weights.leave()
    assert (file.exists(), weights.own_folder.exists()) == (True, False)
    weights.join()
    another.rmdir()
    weights.leave()
    assert not file.exists()


def test_a_replica_leaves_a_node_whose_folder_is_gone(tmp_path: Path) -> None:
    weights = node(tmp_path)
    shutil.rmtree(tmp_path / "node")
    weights.leave()
    assert not (tmp_path / "node").exists()


def test_a_replica_that_joins_removes_what_dead_ones_have_left(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / "node" / "replicas" / str(ended.pid)
    (left / "7").mkdir(parents=True)
    node(tmp_path)
    assert not left.exists()


class Change:
    """Version 8, which the store of another node, or of this one, has as a delta of version 7."""

    def __init__(self, stored: Path, node_id: str = "store's") -> None:
        self.new = stored.with_name("new.safetensors")
        save_file({**GOOD, "norm.weight": torch.tensor([1.0, 5.0, 1.0]).bfloat16()}, self.new)
        self.delta = delta_of(stored, self.new, stored.with_name("delta.safetensors"))
        self.base = payload_of(stored, node_id)
        self.changes = payload_of(self.delta, node_id, version=8)
        self.payload = replace(
            payload_of(self.new, node_id, version=8),
            file=self.changes.file,
            delta=DeltaPayload(self.base, self.changes),
            keep=frozenset({7, 8}),
        )

    def source(self) -> ScriptedReads:
        """Has the delta, and nothing else of version 8."""
        return ScriptedReads(self.delta.read_bytes(), version=8, checksum=self.changes.checksum)

    def away(self) -> VersionPayload:
        return replace(away(self.payload), delta=DeltaPayload(away(self.base), away(self.changes)))


def test_a_node_that_has_the_base_fetches_what_changed_and_makes_the_weights_of_it(
    tmp_path: Path, stored: Path
) -> None:
    change = Change(stored)
    asyncio.run(node(tmp_path, ScriptedReads(stored.read_bytes())).file_of(away(change.base)))
    source = change.source()
    file = asyncio.run(node(tmp_path, source).file_of(change.away()))
    assert file.path.read_bytes() == change.new.read_bytes()
    assert (file.fetched_bytes, file.read_bytes) == (change.changes.size_bytes,) * 2
    assert source.offsets == [0]
    assert files(tmp_path) == names(away(change.base), change.away(), change.changes)


def test_on_the_node_of_the_store_base_and_changes_are_read_where_they_are(tmp_path: Path, stored: Path) -> None:
    change = Change(stored)
    source = change.source()
    file = asyncio.run(node(tmp_path, source, node_id="store's").file_of(change.payload))
    assert file.path.read_bytes() == change.new.read_bytes()
    assert (file.fetched_bytes, file.read_bytes, source.offsets) == (0, change.changes.size_bytes, [])
    assert files(tmp_path) == names(change.payload)


def test_the_replicas_of_a_node_apply_a_delta_once(tmp_path: Path, stored: Path) -> None:
    change = Change(stored)

    async def play() -> Sequence[NodeFile]:
        return await asyncio.gather(*(node(tmp_path, node_id="store's").file_of(change.payload) for _ in range(3)))

    found = asyncio.run(play())
    assert len({file.path for file in found}) == 1
    assert sorted(file.read_bytes for file in found) == [0, 0, change.changes.size_bytes]


def test_weights_that_were_made_of_a_delta_are_the_base_of_the_next(tmp_path: Path, stored: Path) -> None:
    change = Change(stored)
    newest = stored.with_name("newest.safetensors")
    save_file({**GOOD, "scale": torch.tensor(3.0)}, newest)
    changes = payload_of(delta_of(change.new, newest, stored.with_name("delta-9.safetensors")), version=9)
    delta = DeltaPayload(away(payload_of(change.new, version=8)), changes)
    payload = replace(payload_of(newest, version=9), delta=delta, keep=frozenset({8, 9}))

    async def play() -> bytes:
        await node(tmp_path, node_id="store's").file_of(change.payload)
        return (await node(tmp_path, node_id="store's").file_of(payload)).path.read_bytes()

    assert asyncio.run(play()) == newest.read_bytes()


def test_a_node_that_lacks_the_base_fetches_it_too(tmp_path: Path, stored: Path) -> None:
    change = Change(stored)
    base, changes = ScriptedReads(stored.read_bytes()), change.source()

    async def read(version: int, checksum: str, offset: int, count: int) -> bytes:
        source = base if version == change.base.version else changes
        return await source.read(version, checksum, offset, count)

    weights = NodeWeights(tmp_path / "node", "another", read)
    weights.join()
    file = asyncio.run(weights.file_of(change.away()))
    assert file.path.read_bytes() == change.new.read_bytes()
    assert (file.fetched_bytes, file.read_bytes) == (change.base.size_bytes + change.changes.size_bytes,) * 2


def test_a_delta_that_makes_other_weights_is_no_version_and_leaves_nothing(tmp_path: Path, stored: Path) -> None:
    change = Change(stored)
    wrong = replace(change.payload, checksum="0" * 64)
    with pytest.raises(
        WeightsNotFetched, match=f"the delta of version 7 makes weights with the checksum {'[0-9a-f]' * 64}"
    ):
        asyncio.run(node(tmp_path, node_id="store's").file_of(wrong))
    assert [name for name in files(tmp_path) if not name.endswith(".lock")] == []


def test_a_delta_that_does_not_fit_is_no_version(tmp_path: Path, stored: Path) -> None:
    change = Change(stored)
    save_file({"other.gaps": torch.zeros(1, dtype=torch.int32), "other.values": torch.ones(1)}, change.delta)
    with pytest.raises(WeightsNotFetched, match="cannot be applied: weights: other: the base has no such tensor"):
        asyncio.run(node(tmp_path, node_id="store's").file_of(change.payload))
