"""Uploads: bytes that arrive, break off and go on, who may write, what is too large or damaged, and when they go."""

import asyncio
import os
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import zstandard
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from safetensors.torch import save

from deployments.policy.failures import (
    ChunkDamaged,
    ChunkMisplaced,
    UpdateUnderWay,
    VersionRefused,
    VersionUnknown,
    WeightsRefused,
)
from deployments.policy.uploads import EXPIRY_S, OVERTAKEN, Uploads
from deployments.policy.versions import InitialVersion, Versions
from deployments.policy.weight_checks import largest_upload_bytes
from rollout_client.contract.policy import PolicyUpdate, PushOptions
from tests.deployments.policy.policy_world import (
    INITIAL,
    MODEL,
    NORM,
    World,
    adapter,
    delta,
    digest_of,
    in_world,
    refused,
    versions,
    weights,
)
from tests.virtual_time import settled

OTHER = 5
"""A version that is uploaded beside the one of the machine."""


class AnyUpload(RuleBasedStateMachine):
    """An upload that its sender, other senders and dying stores interrupt anywhere, against its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = TemporaryDirectory()
        self.content: bytes | None = None
        self.overtaken: list[str] = []
        self.sender: str | None = None
        self.restart()
        self.uploads_of(OTHER, 0, b"other")

    @rule()
    def restart(self) -> None:
        """Another store takes the place of the one that died."""
        folder = Path(self.folder.name)
        self.uploads = Uploads(Versions(folder, InitialVersion(str(MODEL), folder)), ())
        self.overtake()

    def overtake(self) -> None:
        self.overtaken += [] if self.sender is None else [self.sender]
        self.sender = None

    def uploads_of(self, version: int, offset: int, data: bytes, sender: str | None = None) -> str:
        return self.runner.run(self.uploads.write(version, sender, offset, data))

    @rule(offset=st.integers(0, 12), data=st.binary(max_size=8), is_begun=st.booleans())
    def send(self, offset: int, data: bytes, is_begun: bool) -> None:
        before = self.content or b""
        if is_begun:
            self.overtake()
        try:
            self.sender = self.uploads_of(3, offset, data, self.sender)
        except ChunkMisplaced as misplaced:
            [problem] = misplaced.problems
            message = f"{len(before)} bytes have arrived; go on from there"
            assert (problem.field, problem.message, problem.value) == ("content-range", message, offset)
            assert offset > len(before)
            self.restart()
        else:
            assert offset <= len(before)
            self.content = before[:offset] + data

    @precondition(lambda self: self.overtaken)
    @rule(data=st.data())
    def send_too_late(self, data: st.DataObject) -> None:
        with pytest.raises(ChunkMisplaced, match=OVERTAKEN):
            self.uploads_of(3, len(self.content or b""), b"late", data.draw(st.sampled_from(self.overtaken)))

    @rule(up_to=st.sampled_from([2, 3, None]))
    def drop(self, up_to: int | None) -> None:
        if up_to is None:
            self.uploads.drop(3)
        else:
            self.uploads.drop_up_to(up_to)
        if up_to != 2:
            self.content = None
            self.overtake()

    @precondition(lambda self: self.content)
    @rule()
    def lose_the_last_byte(self) -> None:
        """In a crash of the machine."""
        assert self.content is not None
        self.content = self.content[:-1]
        self.uploads.path(3).write_bytes(self.content)
        self.restart()

    @invariant()
    def bytes_are_those_that_were_sent(self) -> None:
        state = self.uploads.find(3)
        assert (state is None) == (self.content is None)
        if state is not None and self.content is not None:
            assert (state.received_bytes, self.uploads.path(3).read_bytes()) == (len(self.content), self.content)
        assert [each.version for each in self.uploads.states()] == [*([] if state is None else [3]), OTHER]

    def teardown(self) -> None:
        self.runner.close()
        self.folder.cleanup()


TestAnyUpload = AnyUpload.TestCase
TestAnyUpload.settings = settings(stateful_step_count=30, max_examples=settings().max_examples // 2)


@in_world()
async def test_two_senders_of_one_version_never_mix(world: World) -> None:
    first, second = weights(2.0), weights(3.0)
    overtaken = await world.store.write_chunk(1, None, 0, first[:1000])
    await world.upload(1, second)
    async with refused(ChunkMisplaced, "content-range", OVERTAKEN):
        await world.store.complete_upload(1, overtaken, PushOptions(), False, None)
    completing = asyncio.create_task(world.complete(1, PushOptions()))
    await asyncio.sleep(0)
    async with refused(ChunkMisplaced, "content-range", OVERTAKEN):
        await world.store.write_chunk(1, world.senders[1, None], 0, first)
    await completing
    assert world.versions.weights(1).read_bytes() == second


@pytest.mark.parametrize("is_zstd", [False, True])
@in_world()
async def test_what_is_larger_than_weights_can_be_is_refused_and_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, is_zstd: bool
) -> None:
    monkeypatch.setattr("deployments.policy.weight_checks.MAX_HEADER_BYTES", 1000)
    bound = largest_upload_bytes(await world.store.layout())
    content = bytes(bound + 1)
    with pytest.raises(WeightsRefused, match="more than weights of this model can be"):
        await world.push(1, zstandard.compress(content) if is_zstd else content, is_zstd)
    assert world.files() == set()
    sender = await world.store.write_chunk(1, None, 0, b"")
    # It is not too large, but it leaves a hole.
    async with refused(ChunkMisplaced, "content-range", "0 bytes have arrived; go on from there", bound - 1):
        await world.store.write_chunk(1, sender, bound - 1, b"x")
    with pytest.raises(WeightsRefused, match=f"more than {bound} bytes"):
        await world.store.write_chunk(1, sender, bound, b"x")
    with pytest.raises(VersionUnknown):
        await world.store.upload_state(1)


@in_world()
async def test_the_upload_of_a_push_under_way_is_not_dropped(world: World) -> None:
    for version in (1, 2):
        await world.upload(version, weights(2.0))
    may_end = asyncio.Event()

    async def push() -> PolicyUpdate:
        await may_end.wait()
        return PolicyUpdate(version=1, checksum=None, replicas=[])

    pushing = asyncio.create_task(world.policy.push(1, None, push()))
    await settled()
    os.utime(world.policy.uploads.path(1), (0, 0))
    await world.store.policies.clean_up()
    world.policy.uploads.drop_up_to(2)
    assert world.files() == {"uploads/1.part"}
    may_end.set()
    await pushing


@in_world()
async def test_a_refused_upload_is_dropped_unless_trying_again_can_help(world: World) -> None:
    await world.push(1, weights(2.0))
    with pytest.raises(WeightsRefused):
        await world.push(2, delta())
    assert (await world.store.state(0)).uploads == []
    await world.ready("r0", command_s=5.0)
    await world.upload(2, weights(3.0))
    newer = await world.updating(3, weights(3.0))
    await world.upload(4, weights(4.0))
    with pytest.raises(UpdateUnderWay):
        await world.complete(4, PushOptions(if_busy="refuse"))
    with pytest.raises(VersionRefused):
        await world.complete(2, PushOptions())
    await newer
    assert [upload.version for upload in (await world.store.state(0)).uploads] == [4]
    # As a client does that sends the last byte again.
    await world.chunk(4, len(weights(4.0)) - 1, weights(4.0)[-1:])
    assert (await world.complete(4, PushOptions())).version == 4


@in_world()
async def test_an_upload_expires_when_nothing_of_it_has_arrived_for_a_while(world: World) -> None:
    await world.chunk(1, 0, bytes(10))
    await world.chunk(2, 0, bytes(10))
    begun = datetime.now(UTC).timestamp() - EXPIRY_S
    os.utime(world.policy.uploads.path(1), (begun, begun))
    assert (await world.store.upload_state(1)).expires_at == datetime.fromtimestamp(begun + EXPIRY_S, UTC)
    await world.store.policies.clean_up()
    assert [upload.version for upload in (await world.store.state(0)).uploads] == [2]


# Digests


FULL, CHANGES, OF_DELTA = weights(2.0), delta(), {"kind": "delta", "base": 0}
PARTIAL, PACKED = save({NORM: INITIAL[NORM]}), zstandard.compress(delta())
DAMAGES: dict[str, tuple[bytes, dict[str, Any], int]] = {
    "a value": (FULL, {}, -1),
    "a name": (FULL, {}, FULL.index(NORM.encode())),
    "the length of the header": (FULL, {}, 0),
    "a changed value": (CHANGES, OF_DELTA, -1),
    "a partial name": (PARTIAL, {"kind": "partial"}, PARTIAL.index(NORM.encode())),
    "the config of an adapter": (adapter(), {"kind": "adapter"}, adapter().index(b"2}")),
    "the middle of a stream": (PACKED, OF_DELTA, len(PACKED) // 2),
    "the begin of a stream": (PACKED, OF_DELTA, 0),
}
"""The content, the options of its push, and which byte arrives otherwise."""


@pytest.mark.parametrize("damage", DAMAGES)
@in_world()
async def test_an_upload_with_a_damaged_byte_is_dropped_and_can_be_sent_again(world: World, damage: str) -> None:
    content, options, place = DAMAGES[damage]
    is_zstd, digest = content.startswith(zstandard.FRAME_HEADER), digest_of(content)
    arrived = bytearray(content)
    arrived[place] ^= 1
    await world.upload(1, bytes(arrived))
    with pytest.raises(ChunkDamaged) as raised:
        await world.complete(1, PushOptions(**options), is_zstd, digest)
    [problem] = raised.value.problems
    assert (problem.field, problem.value) == ("weights-digest", digest)
    assert problem.message.endswith("; send it again")
    with pytest.raises(VersionUnknown):
        await world.store.upload_state(1)
    assert versions(world) == []
    await world.push(1, content, is_zstd, **options)
    assert world.versions.info(1).upload_digest == digest


@in_world()
async def test_bad_bytes_that_arrived_as_they_were_sent_are_not_called_damaged(world: World) -> None:
    with pytest.raises(WeightsRefused):
        await world.push(1, weights(float("nan")))
    await world.upload(1, weights(2.0))
    with pytest.raises(WeightsRefused, match="the bytes are not a zstd stream, as Content-Encoding says"):
        await world.complete(1, PushOptions(), is_zstd=True)
