"""The digest of an upload: damage is found wherever it happens, and no side hashes the data more than once."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import zstandard
from safetensors.torch import save

from deployments.policy.failures import ChunkDamaged, VersionUnknown, WeightsRefused
from rollout_client.contract.policy import PushOptions
from rollout_client.weights import checksum
from tests.deployments.policy.policy_world import (
    INITIAL,
    NORM,
    World,
    adapter,
    delta,
    digest_of,
    in_world,
    play,
    versions,
    weights,
)

PARTIAL = save({NORM: INITIAL[NORM]})


class Damage(NamedTuple):
    """The content, the options of its push, and which byte arrives otherwise."""

    content: bytes
    options: dict[str, Any]
    place: Callable[[bytes], int]


def last(content: bytes) -> int:
    return len(content) - 1


def name_of_the_norm(content: bytes) -> int:
    return content.index(NORM.encode())


DELTA: dict[str, Any] = {"kind": "delta", "base": 0}
DAMAGES = {
    "a value": Damage(weights(2.0), {}, last),
    "a name": Damage(weights(2.0), {}, name_of_the_norm),
    "the length of the header": Damage(weights(2.0), {}, lambda _: 0),
    "a changed value": Damage(delta(), DELTA, last),
    "a partial value": Damage(PARTIAL, {"kind": "partial"}, last),
    "a partial name": Damage(PARTIAL, {"kind": "partial"}, name_of_the_norm),
    "the config of an adapter": Damage(adapter(), {"kind": "adapter"}, lambda content: content.index(b"2}")),
    "the middle of a stream": Damage(zstandard.compress(delta()), DELTA, lambda content: len(content) // 2),
    "the begin of a stream": Damage(zstandard.compress(delta()), DELTA, lambda _: 0),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("where", ["on its way", "on the disk"])
@in_world()
async def test_an_upload_of_which_a_byte_was_damaged_is_dropped_and_can_be_sent_again(
    world: World, damage: Damage, where: str
) -> None:
    content, place = damage.content, damage.place(damage.content)
    is_zstd, digest = content.startswith(zstandard.FRAME_HEADER), digest_of(content)
    arrived = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    await world.upload(1, arrived if where == "on its way" else content)
    if where == "on the disk":
        (world.folder / "uploads" / "1.part").write_bytes(arrived)
    with pytest.raises(ChunkDamaged) as raised:
        await world.complete(1, PushOptions(**damage.options), is_zstd, digest)
    [problem] = raised.value.problems
    assert (problem.field, problem.value) == ("weights-digest", digest)
    assert problem.message.endswith("; send it again")
    with pytest.raises(VersionUnknown):
        await world.store.upload_state(1)
    assert versions(world) == []
    await world.push(1, content, is_zstd, **damage.options)
    assert world.versions.info(1).upload_digest == digest


@in_world()
async def test_bad_weights_that_arrived_as_they_were_sent_are_refused_and_not_called_damaged(world: World) -> None:
    bad = weights(float("nan"))
    await world.upload(1, bad)
    with pytest.raises(WeightsRefused):
        await world.complete(1, PushOptions(), False, digest_of(bad))


@in_world()
async def test_a_stream_whose_sender_named_no_digest_is_refused_if_it_is_none(world: World) -> None:
    await world.upload(1, weights(2.0))
    with pytest.raises(WeightsRefused, match="the bytes are not a zstd stream, as Content-Encoding says"):
        await world.complete(1, PushOptions(), is_zstd=True)


class CountingSha256:
    def __init__(self, counts: list[int]) -> None:
        self._counts = counts
        self._whole = hashlib.sha256()

    def update(self, data: bytes) -> None:
        self._counts.append(len(data))
        self._whole.update(data)

    def hexdigest(self) -> str:
        return self._whole.hexdigest()


def test_the_store_hashes_the_weights_of_an_upload_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = weights(2.0)
    counts = list[int]()

    def counting(*header: bytes) -> Any:
        return hashlib.sha256(*header) if header else CountingSha256(counts)

    async def story(world: World) -> None:
        digest = digest_of(content)
        monkeypatch.setattr(checksum, "hashlib", SimpleNamespace(sha256=counting))
        await world.upload(1, content)
        await world.complete(1, PushOptions(), False, digest)
        monkeypatch.undo()

    play(story, tmp_path)
    # The checksum hashes a short line for each tensor besides.
    data = sorted(tensor.nbytes for tensor in INITIAL.values())
    assert sorted(count for count in counts if count >= data[0]) == data
