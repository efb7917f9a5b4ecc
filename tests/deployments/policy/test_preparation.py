"""What becomes a version: streams, deltas, partial weights, checkpoints, adapters with other names, and rollbacks."""

import asyncio
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save, save_file

from deployments.policy import versions as versions_module
from deployments.policy.commands import LoadedWeights
from deployments.policy.failures import PolicyFailure, VersionUnknown, WeightsRefused
from deployments.policy.update import Updates
from rollout_client.contract.policy import PushOptions, SwitchOptions, WeightsKind
from rollout_client.weights.checksum import file_checksum
from rollout_client.weights.safetensors_file import read_header
from tests.deployments.policy.policy_world import (
    ADAPTED,
    BASE,
    DELTA,
    HEAD,
    INITIAL,
    MODEL,
    NORM,
    WHOLE,
    World,
    adapter,
    changed,
    checksum_of,
    content_of,
    delta,
    digest_of,
    fleet,
    full_weights,
    in_world,
    nothing,
    play,
    push_deltas,
    refused,
    taken,
    version_files,
    versions,
    weights,
)
from tests.virtual_time import until


@in_world()
async def test_partial_weights_are_completed_from_those_of_their_base(world: World, tmp_path: Path) -> None:
    replica = await world.replica("r0")
    await world.push(1, weights(2.0))
    await world.push(2, adapter(), kind="adapter")
    # Without a base, the full weights that are current.
    await world.push(3, save({HEAD: INITIAL[HEAD] * 3.0}), kind="partial")
    (tmp_path / "staged").write_bytes(content_of(replica.staged))
    served = load_file(tmp_path / "staged")
    expected = {**INITIAL, NORM: INITIAL[NORM] * 2.0, HEAD: INITIAL[HEAD] * 3.0}
    assert served.keys() == expected.keys()
    assert all(torch.equal(served[name], tensor) for name, tensor in expected.items())
    stored = world.versions.info(3)
    assert (stored.kind, stored.base, stored.checksum) == ("partial", 1, file_checksum(tmp_path / "staged"))
    await world.push(4, save({NORM: INITIAL[NORM]}), kind="partial", base=0)
    assert world.versions.info(4).checksum == file_checksum(MODEL / "model.safetensors")
    async with refused(WeightsRefused, "weights", "partial weights hold at least one tensor"):
        await world.push(5, save({}), kind="partial")


NO_BASE = "full weights have no base: a delta, partial weights and an adapter have one"


@pytest.mark.parametrize(
    ("kind", "base", "failure", "field", "message"),
    [
        ("delta", None, WeightsRefused, "base", "a delta must say which version it changes"),
        ("delta", 9, VersionUnknown, "version", "it is not stored here, or no longer"),
        ("delta", 2, WeightsRefused, "base", "the version has no full weights here"),
        ("partial", 9, VersionUnknown, "version", "it is not stored here, or no longer"),
        ("full", 1, WeightsRefused, "base", NO_BASE),
    ],
)
@in_world()
async def test_a_base_that_cannot_be_is_refused(
    world: World, kind: str, base: int | None, failure: type[PolicyFailure], field: str, message: str
) -> None:
    await world.push(1, weights(2.0))
    await world.push(2, adapter(), kind="adapter")
    async with refused(failure, field, message, base):
        await world.push(3, delta(), kind=kind, base=base)
    assert world.versions.current == 2


def test_checkpoints_of_weights_and_adapters_under_a_root_become_versions(tmp_path: Path) -> None:
    place, of_adapter = tmp_path / "roots" / "step", tmp_path / "roots" / "adapter"
    place.mkdir(parents=True)
    of_adapter.mkdir()
    for number, name in enumerate(INITIAL):
        save_file({name: INITIAL[name]}, place / f"{number}.safetensors")
    (of_adapter / "adapter_model.safetensors").write_bytes(adapter(rank=4))
    (of_adapter / "adapter_config.json").write_text('{"r": 4}')

    async def story(world: World) -> None:
        replica = await world.replica("r0")
        loads = [asyncio.create_task(world.store.load_checkpoint(1, str(place), PushOptions())) for _ in range(2)]
        first, second = await asyncio.gather(*loads)
        assert first == second
        assert (first.checksum, replica.loaded) == (file_checksum(MODEL / "model.safetensors"), LoadedWeights(1))
        assert world.files() == {"versions.json", "versions/1.safetensors"}
        assert len(list(place.iterdir())) == len(INITIAL)
        await world.store.load_checkpoint(2, str(of_adapter), PushOptions(kind="adapter"))
        stored = world.versions.info(2)
        assert (stored.kind, stored.adapter_config, stored.source) == ("adapter", '{"r": 4}', str(of_adapter))

    play(story, tmp_path, checkpoint_roots=[str(tmp_path / "roots")])


# Deltas


@in_world()
async def test_a_delta_is_sent_as_a_delta_and_each_node_makes_the_weights(world: World) -> None:
    replicas = await fleet(world, "r0", "r1")
    [update] = await push_deltas(world, 1)
    new = full_weights(2)[1]
    assert [(each.loaded, each.files[2], each.deltas) for each in replicas] == [(LoadedWeights(2), new, [2])] * 2
    stored = world.versions.info(2)
    assert (stored.kind, stored.base, stored.size_bytes) == ("delta", 1, len(new))
    assert stored.delta_bytes == len(delta(1.0, 1))
    assert update.checksum == stored.checksum == checksum_of(new)
    [_, _, listed] = (await world.store.state(0)).versions
    assert (listed.size_bytes, listed.delta_bytes) == (len(new), len(delta(1.0, 1)))


@in_world()
async def test_a_delta_without_a_checksum_or_of_an_old_base_the_store_applies(world: World) -> None:
    [replica] = await fleet(world, "r0")
    update = await world.push(2, delta(1.0, 1), kind="delta", base=1)
    assert (replica.files[2], update.checksum) == (full_weights(2)[1], checksum_of(full_weights(2)[1]))
    new = changed(BASE, 5.0, 5)
    await world.push(4, delta(5.0, 5), kind="delta", base=1, checksum=checksum_of(new))
    assert (replica.files[4], replica.deltas) == (new, [])
    assert version_files(world) == {2: WHOLE, 4: WHOLE}
    assert [each.delta_bytes for each in world.versions.all] == [None, None]


@pytest.mark.parametrize("names", [("r0", "r1"), ()], ids=["found out by the nodes", "found out by the store"])
@in_world()
async def test_a_delta_that_makes_other_weights_is_refused_before_a_pause(world: World, names: Sequence[str]) -> None:
    replicas = await fleet(world, *names)
    world.cluster.events.clear()
    with pytest.raises(WeightsRefused, match="makes weights with the checksum"):
        # As for a base that is not version 1.
        await world.push(2, delta(), kind="delta", base=1, checksum=checksum_of(changed(weights(3.0))))
    assert world.cluster.done("swap") == []
    assert [replica.loaded for replica in replicas] == [LoadedWeights(1)] * len(names)
    assert (versions(world), world.versions.current, world.cluster.killed) == ([1], 1, [])
    assert [update.version for update in await push_deltas(world, 1)] == [2]


@pytest.mark.parametrize("kind", ["full", "delta"])
@in_world()
async def test_weights_with_another_checksum_than_their_sender_says_are_refused(world: World, kind: str) -> None:
    await fleet(world)
    await push_deltas(world, 1)
    content, base = {"full": (weights(4.0), None), "delta": (delta(), 1)}[kind]
    made = checksum_of(weights(4.0) if kind == "full" else changed(BASE))
    async with refused(WeightsRefused, "checksum", f"the weights have {made}", "0" * 64):
        await world.push(3, content, kind=kind, base=base, checksum="0" * 64)
    assert world.versions.current == 2


@in_world(keep_versions=1)
async def test_full_weights_of_a_delta_follow_its_activation(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    [replica] = await fleet(world, "r0")
    with monkeypatch.context() as patched:
        patched.setattr(Updates, "write_full_weights", nothing)
        await push_deltas(world, 1)
        assert version_files(world) == {1: WHOLE, 2: DELTA}, "its base stays as long"
        await push_deltas(world, 1, first=3)
        assert version_files(world) == {2: WHOLE, 3: DELTA}, "no delta lies above another"
    await world.restart()
    await until(lambda: version_files(world) == {3: WHOLE})
    assert world.versions.weights(3).read_bytes() == full_weights(3)[2]
    assert replica.deltas == [2, 3]


@in_world()
async def test_a_delta_can_be_read_until_its_update_has_ended(world: World) -> None:
    [replica] = await fleet(world, "r0")
    replica.command_s = 5.0
    pushing = asyncio.create_task(push_deltas(world, 1))
    await until(lambda: world.versions.delta(2).exists())
    # A node needs the full weights meanwhile.
    assert await world.store.read_weights(2, checksum_of(full_weights(2)[1]), 0, 10**7) == full_weights(2)[1]
    assert (world.versions.delta(2).read_bytes(), versions(world)) == (delta(1.0, 1), [1])
    await pushing
    assert (replica.files[2], version_files(world)) == (full_weights(2)[1], {1: WHOLE, 2: WHOLE})


@in_world()
async def test_full_weights_that_could_not_be_written_are_written_when_needed(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(*_: object) -> str:
        raise OSError("no space left")

    await fleet(world, "r0")
    with monkeypatch.context() as patched:
        patched.setattr(versions_module, "write_applied", no_space)
        await push_deltas(world, 1)
        await until(lambda: "The full weights of version 2 could not be made." in caplog.messages)
    assert version_files(world) == {1: WHOLE, 2: DELTA}
    assert ((await world.ready("late")).files, version_files(world)[2]) == ({2: full_weights(2)[1]}, WHOLE)


# Names


async def pushed_names(world: World, content: bytes, kind: WeightsKind) -> set[str]:
    version = world.policy.next_number()
    await world.push(version, content, kind=kind)
    return {entry.name for entry in read_header(world.versions.weights(version)).entries}


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.module.", "base_model.model."])
@in_world()
async def test_what_wrappers_add_to_names_is_taken_off_all_kinds_of_weights(world: World, wrapper: str) -> None:
    full = save({f"{wrapper}{name}": tensor for name, tensor in INITIAL.items()})
    assert await pushed_names(world, full, "full") == set(INITIAL)
    assert await pushed_names(world, save({f"{wrapper}{NORM}": INITIAL[NORM] * 2}), "partial") == set(INITIAL)
    changes = save({f"{wrapper}{name}": tensor for name, tensor in load(delta()).items()})
    checksum = checksum_of(changed(weights(2)))
    await world.push(3, changes, kind="delta", base=2, checksum=checksum)
    assert world.versions.info(3).checksum == checksum
    config = {"r": 2, "rank_pattern": {f"{wrapper}{ADAPTED}": 2, "q_proj": 4}, "alpha_pattern": {}}
    matrices = save(load(adapter(module=f"{wrapper}{ADAPTED}")), {"adapter_config": json.dumps(config)})
    names = {f"base_model.model.{ADAPTED}.{half}.weight" for half in ("lora_A", "lora_B")}
    assert await pushed_names(world, matrices, "adapter") == names
    assert await world.store.repeated_update(4, digest_of(matrices)) is not None, "under the digest of what was sent"
    if wrapper != "base_model.model.":
        stored = json.loads(str(world.versions.info(4).adapter_config))
        assert stored == {**config, "rank_pattern": {f"^{re.escape(ADAPTED)}": 2}}


@in_world()
async def test_two_tensors_that_are_one_in_the_model_are_refused(world: World) -> None:
    twice = load(adapter()) | load(adapter(module=f"module.{ADAPTED}"))
    with pytest.raises(WeightsRefused, match=f"is the same tensor of the model, base_model.model.{ADAPTED}"):
        await world.push(1, save(twice, {"adapter_config": "{}"}), kind="adapter")


# Rollbacks


@in_world(keep_versions=3)
async def test_a_rollback_is_a_new_version_with_the_old_bytes_and_no_copy(world: World) -> None:
    replica = await world.replica("r0")
    for version in (5, 6):
        await world.push(version, weights(version))
    async with taken(5, newest=6):
        await world.store.roll_back(5, 5, SwitchOptions())
    update = await world.store.roll_back(5, None, SwitchOptions())
    assert (update.version, replica.loaded, content_of(replica.staged)) == (7, LoadedWeights(7), weights(5))
    stored = world.versions.info(7)
    assert (stored.kind, stored.rollback_of, stored.base) == ("full", 5, None)
    assert update.checksum == stored.checksum == file_checksum(world.versions.weights(7))
    assert (await world.store.state(0)).versions[-1].rollback_of == 5
    assert world.versions.weights(7).samefile(world.versions.weights(5))
    back = await world.store.roll_back(0, 20, SwitchOptions())
    assert (back.version, back.checksum) == (20, file_checksum(MODEL / "model.safetensors"))
    assert versions(world) == [6, 7, 20]
    assert world.versions.weights(7).read_bytes() == weights(5), "the version that they came from is removed"
    message = "its weights are not stored here, or no longer; stored are 0, 6, 7, 20"
    async with refused(VersionUnknown, "to", message, 1):
        await world.store.roll_back(1, None, SwitchOptions())
    assert (await world.store.state(0)).current == 20


@in_world()
async def test_an_adapter_can_be_rolled_back_to_on_top_of_its_own_weights_alone(world: World) -> None:
    await world.push(1, weights(2.0))
    await world.push(2, adapter(), kind="adapter")
    assert (await world.store.roll_back(2, None, SwitchOptions())).version == 3
    stored = world.versions.info(3)
    assert (stored.kind, stored.base, stored.rollback_of, stored.adapter_config) == ("adapter", 1, 2, '{"r": 2}')
    world.versions.make_current(stored.model_copy(update={"version": 9, "base": 0}))
    os.link(world.versions.weights(3), world.versions.weights(9))
    world.versions.make_current(world.versions.info(1))
    message = "it is an adapter for the weights of version 0, and those of version 1 are current; roll back to 0 first"
    async with refused(WeightsRefused, "to", message, 9):
        await world.store.roll_back(9, 20, SwitchOptions())


@in_world(keep_versions=1)
async def test_an_adapter_is_served_again_as_a_named_policy(world: World) -> None:
    replica = await world.replica("r0")
    await world.push(1, weights(2.0))
    await world.push(2, adapter(2), kind="adapter")
    checksum = world.versions.info(2).checksum
    update = await world.store.roll_back(2, None, SwitchOptions(), "again")
    await world.push(3, adapter(3), kind="adapter")
    assert (update.label, update.base, replica.loaded) == ("again/1", 1, LoadedWeights(1, 3))
    assert [(named.name, named.checksum) for named in (await world.store.state(0)).named] == [("again", checksum)]
    message = "a named policy is an adapter, and this version is not one; roll back without a name"
    async with refused(WeightsRefused, "to", message, 1):
        await world.store.roll_back(1, None, SwitchOptions(), "full")
    assert [named.name for named in (await world.store.state(0)).named] == ["again"]
