"""The versions of one node: mapped where they can be read, fetched once however many replicas ask, and removed."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest
import torch
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from deployments.failures import PolicyStoreLost
from deployments.policy import node_files
from deployments.policy.commands import DeltaPayload, StoredFile, VersionPayload
from deployments.policy.failures import VersionUnknown
from deployments.policy.node_files import READ_TIMEOUT_S, READS_IN_FLIGHT, NodeFile, NodeWeights, WeightsNotFetched
from deployments.storage.storage import AWAY_S
from rollout_client.weights.checksum import file_checksum
from tests.deployments.policy.policy_world import a_payload
from tests.deployments.policy.weight_files import GOOD, delta_of
from tests.virtual_time import now, synchronous

LOST = PolicyStoreLost("The policy store died during the call.")


@dataclass
class ScriptedReads:
    """Stands in for `PolicyStore.read_weights`: it gives the bytes of one file, or fails as told."""

    content: bytes
    failing: range = range(0)
    """The reads that raise `failure`, by their number from 0."""
    failure: Exception = LOST
    hangs: bool = False
    version: int = 7
    checksum: str | None = None
    """Other versions are not held; `None`: any checksum is right."""
    offsets: list[int] = field(default_factory=list)
    """The offsets of the reads, in order."""
    reading: int = 0
    most_reading: int = 0
    """The most reads that were under way at a time."""

    async def read(self, version: int, checksum: str, offset: int, count: int) -> bytes:
        number = len(self.offsets)
        self.offsets.append(offset)
        self.reading += 1
        self.most_reading = max(self.most_reading, self.reading)
        await asyncio.sleep(0)
        if self.hangs:
            await asyncio.Event().wait()
        self.reading -= 1
        if version != self.version or self.checksum not in (None, checksum):
            raise VersionUnknown.not_stored(version)
        if number in self.failing:
            raise self.failure
        return self.content[offset : offset + count]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The file of version 7 in the folder of the policy store."""
    path = tmp_path / "policy" / "weights.safetensors"
    path.parent.mkdir()
    save_file(GOOD, path)
    return path


def payload_of(stored: Path, version: int = 7, is_copied: bool = False) -> VersionPayload:
    """The payload as the policy store makes it."""
    found = stored.stat()
    file = StoredFile(str(stored), "store's", found.st_ino, found.st_mtime_ns, is_copied)
    return VersionPayload(version, "full", found.st_size, file_checksum(stored), file, keep=frozenset({version}))


def away(payload: VersionPayload) -> VersionPayload:
    """The payload for a node that cannot read the file of the store."""
    return replace(payload, file=replace(payload.file, path="/of/another/machine"))


def node(folder: Path, source: ScriptedReads | None = None, node_id: str = "another") -> NodeWeights:
    """The view of one of the node's replicas; without a source nothing can be fetched."""
    weights = NodeWeights(folder / "node", node_id, (source or ScriptedReads(b"", version=-1)).read)
    weights.join()
    return weights


def files(folder: Path, *, locks: bool = True) -> list[str]:
    found = (path.name for path in (folder / "node" / "versions").iterdir())
    return sorted(name for name in found if locks or not name.endswith(".lock"))


def names(*payloads: VersionPayload) -> list[str]:
    """The names of the files of a node that holds these versions."""
    stems = [f"{payload.version}-{payload.checksum}" for payload in payloads]
    return sorted([f"{stem}.lock" for stem in stems] + [f"{stem}.safetensors" for stem in stems])


def place_of(folder: Path, payload: VersionPayload) -> Path:
    return folder / "node" / "versions" / names(payload)[1]


@pytest.mark.parametrize(
    ("node_id", "is_copied", "is_another_file", "is_mapped"),
    [
        ("store's", True, False, True),
        ("another", False, False, True),
        ("another", True, False, False),
        ("another", False, True, False),
    ],
)
def test_the_stores_own_file_is_mapped_where_it_can_be_read(
    tmp_path: Path, stored: Path, node_id: str, is_copied: bool, is_another_file: bool, is_mapped: bool
) -> None:
    payload, source = payload_of(stored, is_copied=is_copied), ScriptedReads(stored.read_bytes())
    if is_another_file:
        # Of the same path and size.
        shutil.copy2(stored, tmp_path / "copy")
        (tmp_path / "copy").rename(stored)
    file = asyncio.run(node(tmp_path, source, node_id).file_of(payload))
    if is_mapped:
        assert (file, source.offsets) == (NodeFile(stored, read_bytes=payload.size_bytes), [])
    else:
        assert (file.path.parent.name, file.fetched_bytes) == ("versions", payload.size_bytes)
        assert file.path.read_bytes() == stored.read_bytes()


@synchronous
async def files_of_three(node: Callable[[], NodeWeights], payload: VersionPayload) -> list[NodeFile]:
    """Of three replicas that ask at once."""
    return await asyncio.gather(*(node().file_of(payload) for _ in range(3)))


def test_the_replicas_of_a_node_fetch_a_version_once_and_map_one_file(tmp_path: Path, stored: Path) -> None:
    source, payload = ScriptedReads(stored.read_bytes()), away(payload_of(stored))
    found = files_of_three(lambda: node(tmp_path, source), payload)
    assert len({file.path for file in found}) == 1
    assert sorted(file.fetched_bytes for file in found) == [0, 0, payload.size_bytes]
    assert source.offsets == [0]
    assert files(tmp_path) == names(payload)
    assert asyncio.run(node(tmp_path).file_of(payload)) == NodeFile(found[0].path), "a replica that comes later"


async def test_while_another_process_fetches_a_version_the_replica_waits_for_it(tmp_path: Path, stored: Path) -> None:
    payload, weights = away(payload_of(stored)), node(tmp_path)
    final = place_of(tmp_path, payload)
    with FileLock(final.with_suffix(".lock")):
        waiting = asyncio.create_task(weights.file_of(payload))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        shutil.copy(stored, final)
    assert await waiting == NodeFile(final)


def test_what_a_process_had_fetched_when_it_died_is_fetched_anew(tmp_path: Path, stored: Path) -> None:
    payload, weights = away(payload_of(stored)), node(tmp_path, ScriptedReads(stored.read_bytes()))
    place_of(tmp_path, payload).with_suffix(".fetching").write_bytes(b"longer than the whole file" * 100)
    assert asyncio.run(weights.file_of(payload)).path.read_bytes() == stored.read_bytes()
    assert files(tmp_path) == names(payload)


@pytest.mark.parametrize("damaged", [-1, 9], ids=["data", "header"])
def test_damaged_bytes_are_no_version(tmp_path: Path, stored: Path, damaged: int) -> None:
    content = bytearray(stored.read_bytes())
    content[damaged] ^= 0xFF
    with pytest.raises(WeightsNotFetched, match="What was fetched as version 7 has another checksum"):
        asyncio.run(node(tmp_path, ScriptedReads(bytes(content))).file_of(away(payload_of(stored))))
    assert files(tmp_path, locks=False) == []


def test_versions_that_nobody_needs_leave_the_node_when_another_one_comes(tmp_path: Path, stored: Path) -> None:
    source = ScriptedReads(stored.read_bytes())
    old, current, new = (away(payload_of(stored, version=version)) for version in (5, 6, 7))
    for payload, keep in ((old, {5}), (current, {5, 6}), (new, {6, 7})):
        source.version = payload.version
        asyncio.run(node(tmp_path, source).file_of(replace(payload, keep=frozenset(keep))))
    assert files(tmp_path) == names(current, new)


def test_a_version_that_is_being_fetched_is_not_removed(tmp_path: Path, stored: Path) -> None:
    old, new = (away(payload_of(stored, version=version)) for version in (6, 7))
    weights = node(tmp_path, ScriptedReads(stored.read_bytes()))
    being_fetched = place_of(tmp_path, old)
    being_fetched.with_suffix(".fetching").touch()
    with FileLock(being_fetched.with_suffix(".lock")):
        asyncio.run(weights.file_of(new))
        assert being_fetched.with_suffix(".fetching").exists()
    asyncio.run(weights.file_of(new))
    assert files(tmp_path) == names(new)


def test_the_last_replica_that_leaves_a_node_removes_its_versions(tmp_path: Path, stored: Path) -> None:
    weights = node(tmp_path, ScriptedReads(stored.read_bytes()))
    file = asyncio.run(weights.file_of(away(payload_of(stored)))).path
    another = tmp_path / "node" / "replicas" / str(os.getppid())
    another.mkdir()
    weights.leave()
    assert (file.exists(), weights.own_folder.exists()) == (True, False)
    weights.join()
    another.rmdir()
    weights.leave()
    assert not file.exists()
    shutil.rmtree(tmp_path / "node")
    weights.leave()
    assert not (tmp_path / "node").exists()


def test_a_replica_that_joins_removes_what_dead_ones_have_left(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as ended:
        pass
    left = tmp_path / "node" / "replicas" / str(ended.pid)
    (left / "7").mkdir(parents=True)
    node(tmp_path)
    assert not left.exists()


# Deltas


class Change:
    """Version 8, which the store has as a delta of version 7."""

    def __init__(self, stored: Path) -> None:
        self.new = stored.with_name("new.safetensors")
        save_file({**GOOD, "norm.weight": torch.tensor([1.0, 5.0, 1.0]).bfloat16()}, self.new)
        self.delta = delta_of(stored, self.new, stored.with_name("delta.safetensors"))
        self.base, self.changes = payload_of(stored), payload_of(self.delta, version=8)
        self.payload = replace(
            payload_of(self.new, version=8),
            file=self.changes.file,
            delta=DeltaPayload(self.base, self.changes),
            keep=frozenset({7, 8}),
        )

    def away(self) -> VersionPayload:
        return replace(away(self.payload), delta=DeltaPayload(away(self.base), away(self.changes)))


@pytest.mark.parametrize("has_base", [True, False])
def test_a_node_fetches_the_changes_and_a_base_that_it_lacks(tmp_path: Path, stored: Path, has_base: bool) -> None:
    change = Change(stored)
    base = ScriptedReads(stored.read_bytes())
    changes = ScriptedReads(change.delta.read_bytes(), version=8, checksum=change.changes.checksum)

    async def read(version: int, checksum: str, offset: int, count: int) -> bytes:
        return await (base if version == 7 else changes).read(version, checksum, offset, count)

    if has_base:
        asyncio.run(node(tmp_path, base).file_of(away(change.base)))
    weights = NodeWeights(tmp_path / "node", "another", read)
    weights.join()
    file = asyncio.run(weights.file_of(change.away()))
    assert file.path.read_bytes() == change.new.read_bytes()
    size = change.changes.size_bytes + (0 if has_base else change.base.size_bytes)
    assert (file.fetched_bytes, file.read_bytes) == (size, size)
    assert (base.offsets, changes.offsets) == ([0], [0])
    assert files(tmp_path) == names(away(change.base), change.away(), change.changes)


def test_on_the_node_of_the_store_a_delta_is_applied_once(tmp_path: Path, stored: Path) -> None:
    change = Change(stored)
    found = files_of_three(lambda: node(tmp_path, node_id="store's"), change.payload)
    assert {file.path.read_bytes() for file in found} == {change.new.read_bytes()}
    assert sorted(file.read_bytes for file in found) == [0, 0, change.changes.size_bytes]
    assert {file.fetched_bytes for file in found} == {0}
    assert files(tmp_path) == names(change.payload)
    # What was made of a delta is the base of the next.
    newest = stored.with_name("newest.safetensors")
    save_file({**GOOD, "scale": torch.tensor(3.0)}, newest)
    changes = payload_of(delta_of(change.new, newest, stored.with_name("delta-9.safetensors")), version=9)
    delta = DeltaPayload(away(payload_of(change.new, version=8)), changes)
    payload = replace(payload_of(newest, version=9), delta=delta, keep=frozenset({8, 9}))
    file = asyncio.run(node(tmp_path, node_id="store's").file_of(payload))
    assert file.path.read_bytes() == newest.read_bytes()


def test_a_delta_that_makes_other_weights_or_does_not_fit_is_no_version(tmp_path: Path, stored: Path) -> None:
    change = Change(stored)
    wrong = replace(change.payload, checksum="0" * 64)
    message = "Version 8 has the checksum 0{64}; the delta of version 7 makes weights with the checksum [0-9a-f]{64}"
    with pytest.raises(WeightsNotFetched, match=message):
        asyncio.run(node(tmp_path, node_id="store's").file_of(wrong))
    save_file({"other.gaps": torch.zeros(1, dtype=torch.int32), "other.values": torch.ones(1)}, change.delta)
    with pytest.raises(WeightsNotFetched, match="cannot be applied: weights: other: the base has no such tensor"):
        asyncio.run(node(tmp_path, node_id="store's").file_of(change.payload))
    assert files(tmp_path, locks=False) == []


# Ranges

RANGE = 10
CONTENT = Random(0).randbytes(95)


@pytest.fixture(scope="class")
def short_ranges() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_files, "READ_BYTES", RANGE)
        patch.setattr(node_files, "file_checksum", lambda _: "checksum")
        yield


@synchronous
async def fetched(folder: Path, source: ScriptedReads, size: int | None = None, after_s: float = 0.0) -> bytes:
    """The file that a node has fetched, or the failure `after_s` seconds."""
    weights = node(folder, source)
    payload = replace(a_payload(7), size_bytes=len(source.content) if size is None else size)
    try:
        return (await weights.file_of(payload)).path.read_bytes()
    finally:
        assert now() == after_s
        assert not [name for name in await asyncio.to_thread(files, folder) if name.endswith(".fetching")]


@pytest.mark.usefixtures("short_ranges")
@given(size=st.integers(0, 130))
def test_each_range_is_read_once_and_a_few_at_a_time(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    source = ScriptedReads(Random(size).randbytes(size))
    assert fetched(tmp_path_factory.mktemp("fetched"), source) == source.content
    assert source.offsets == list(range(0, size, RANGE))
    assert source.most_reading == min(len(source.offsets), READS_IN_FLIGHT)


@pytest.mark.parametrize(
    ("source", "reason", "after_s"),
    [
        (ScriptedReads(CONTENT, range(2, 99), OSError("it died")), "it died", 0.0),
        (ScriptedReads(CONTENT, version=8), "version: it is not stored here, or no longer", 0.0),
        (ScriptedReads(CONTENT[:25]), "5 bytes came in place of 10", 0.0),
        (ScriptedReads(CONTENT, hangs=True), "nothing came for 60 s", READ_TIMEOUT_S),
        (ScriptedReads(CONTENT, range(2, 10_000)), "The policy store died during the call", AWAY_S),
    ],
)
@pytest.mark.usefixtures("short_ranges")
def test_a_range_not_given_fails_the_fetch(tmp_path: Path, source: ScriptedReads, reason: str, after_s: float) -> None:
    with pytest.raises(WeightsNotFetched, match=f"^The weights of version 7 could not be fetched: {reason}"):
        fetched(tmp_path, source, size=95, after_s=after_s)


@pytest.mark.usefixtures("short_ranges")
def test_a_fetch_outlives_a_restart_of_the_store(tmp_path: Path) -> None:
    source = ScriptedReads(CONTENT, range(2, 10))
    assert fetched(tmp_path, source, after_s=1.0) == CONTENT
    assert len(source.offsets) == 10 + 8


@pytest.mark.usefixtures("short_ranges")
def test_a_full_disk_ends_the_fetch_with_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> int:
        raise OSError("No space left")

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(OSError, match="No space left"):
        fetched(tmp_path, ScriptedReads(CONTENT))
