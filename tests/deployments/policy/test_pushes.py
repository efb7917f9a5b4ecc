"""Pushes of uploads and checkpoints: what is refused, what is answered again, and what becomes a version."""

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from safetensors.torch import load, load_file, save, save_file

from deployments.policy.commands import LoadedWeights
from deployments.policy.failures import PolicyFailure, VersionRefused, VersionUnknown, WeightsRefused
from rollout_client.contract.policy import PolicyUpdate, PushOptions, WeightsKind
from rollout_client.weights.checksum import file_checksum
from rollout_client.weights.safetensors_file import read_header
from tests.deployments.policy.policy_world import (
    ADAPTED,
    INITIAL,
    NORM,
    World,
    adapter,
    changed,
    checksum_of,
    content_of,
    delta,
    digest_of,
    in_world,
    play,
    refused,
    weights,
)
from tests.paths import TINY_MODEL
from tests.virtual_time import settled, until


@in_world()
async def test_an_upload_may_be_compressed(world: World) -> None:
    replica = await world.replica("r0")
    packed = zstandard.compress(weights(2.0))
    await world.push(1, packed, is_zstd=True)
    assert content_of(replica.staged) == weights(2.0)
    assert world.versions.info(1).upload_digest == digest_of(weights(2.0))
    assert not list(world.folder.glob("uploads/*"))


def bad(how: str) -> bytes:
    if how == "nan":
        return weights(float("nan"))
    if how == "missing":
        return save({name: tensor for name, tensor in INITIAL.items() if name != NORM})
    return weights(1.0)[:-1]


@pytest.mark.parametrize(("how", "field"), [("nan", NORM), ("missing", NORM), ("cut", "weights")])
@in_world()
async def test_bad_weights_leave_everything_as_it_was_and_no_command_is_sent(
    world: World, how: str, field: str
) -> None:
    replica = await world.replica("r0")
    await world.push(1, weights(2.0))
    commands, files = list(replica.taken), world.files()
    with pytest.raises(WeightsRefused) as raised:
        await world.push(2, bad(how))
    assert [problem.field for problem in raised.value.problems] == [field]
    state = await world.store.state(0)
    assert (state.current, state.updating_to, replica.taken) == (1, None, commands)
    assert world.files() == files
    # The number is free again.
    assert (await world.push(2, weights(3.0))).version == 2


@in_world()
async def test_an_update_goes_on_when_its_caller_goes_away(world: World) -> None:
    await world.replica("r0", command_s=5.0)
    pushing = world.pushing(1, weights(2.0))
    await world.until_updating(1)
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    assert (await world.store.wait_for(None, 1, None, 60.0)).versions[""] == 1
    assert world.cluster.done("swap") == [("r0", 1)]


@in_world()
async def test_the_same_upload_again_is_answered_again_and_others_are_refused(world: World) -> None:
    await world.replica("r0")
    content = weights(2.0)
    update = await world.push(3, content)
    assert await world.store.repeated_update(3, digest_of(content)) == update
    digest, other = digest_of(content), digest_of(weights(3.0))
    for version, named in ((3, other), (3, None), (4, digest), (2, digest)):
        assert await world.store.repeated_update(version, named) is None
    await world.restart()
    without_replicas = PolicyUpdate(version=3, checksum=update.checksum, replicas=[])
    assert await world.store.repeated_update(3, digest_of(content)) == without_replicas
    await world.push(4, weights(3.0))
    assert await world.store.repeated_update(3, digest_of(content)) == without_replicas


IS_ACTIVE = "all of it has arrived, and it is being validated and loaded by the replicas"


@in_world()
async def test_the_same_upload_again_while_it_is_under_way_has_the_same_answer(world: World) -> None:
    for name in ("r0", "r1"):
        await world.ready(name, command_s=5.0)
    content = weights(2.0)
    await world.upload(3, content)
    completing = asyncio.create_task(world.complete(3, PushOptions(), False, digest_of(content)))
    await asyncio.sleep(0)
    for is_later in (False, True):
        if is_later:
            await until(lambda: bool(world.cluster.done("stage")))
        else:
            # It is still being checked: nothing may touch what arrived.
            async with refused(VersionRefused, "version", IS_ACTIVE, 3):
                await world.store.write_chunk(3, None, 0, b"")
        async with refused(VersionRefused, "version", IS_ACTIVE, 3):
            await world.complete(3, PushOptions(), False, digest_of(content))
        assert await world.store.repeated_update(3, "0" * 64) is None
        assert await world.store.repeated_update(3, None) is None
    again = asyncio.create_task(world.store.repeated_update(3, digest_of(content)))
    update = await completing
    assert await again == update
    assert [replica.status for replica in update.replicas] == ["swapped", "swapped"]
    assert len(world.cluster.done("swap")) == 2


@in_world()
async def test_a_push_whose_sender_named_no_digest_is_not_answered_again_before_it_is_current(world: World) -> None:
    await world.replica("r0", command_s=5.0)
    content = weights(2.0)
    await world.upload(3, content)
    completing = asyncio.create_task(world.complete(3, PushOptions(), False, None))
    await until(lambda: bool(world.cluster.done("stage")))
    assert await world.store.repeated_update(3, digest_of(content)) is None
    update = await completing
    assert await world.store.repeated_update(3, digest_of(content)) == update


@in_world()
async def test_the_same_bad_upload_again_while_it_is_checked_has_the_same_answer(world: World) -> None:
    content = bad("nan")
    completing = world.pushing(1, content)
    await until(lambda: 1 in world.policy._pushes)
    with pytest.raises(WeightsRefused):
        await world.store.repeated_update(1, digest_of(content))
    with pytest.raises(WeightsRefused):
        await completing
    assert not world.policy._pushes


@in_world()
async def test_the_next_number_is_above_that_of_a_push_that_is_being_checked_and_free_again_when_it_is_refused(
    world: World,
) -> None:
    pushing = world.pushing(4, bad("nan"))
    await until(lambda: 4 in world.policy._pushes)
    assert (await world.store.state()).next_version == 5
    with pytest.raises(WeightsRefused):
        await pushing
    assert (await world.store.state()).next_version == 1


@in_world()
async def test_a_delta_may_change_the_initial_weights(world: World) -> None:
    pushes = [world.pushing(version, delta(), kind="delta", base=0) for version in (1, 2, 3)]
    done = await asyncio.gather(*pushes, return_exceptions=True)
    assert isinstance(done[-1], PolicyUpdate)
    assert {type(answer) for answer in done} <= {PolicyUpdate, VersionRefused}
    assert world.versions.current == 3


@in_world()
async def test_partial_weights_are_completed_from_the_full_weights_that_are_current(
    world: World, tmp_path: Path
) -> None:
    replica = await world.replica("r0")
    await world.push(1, weights(2.0))
    await world.push(2, adapter(), kind="adapter")
    head = "model.embed_tokens.weight"
    await world.push(3, save({head: INITIAL[head] * 3.0}), kind="partial")
    (tmp_path / "staged").write_bytes(content_of(replica.staged))
    served = load_file(tmp_path / "staged")
    expected = {**INITIAL, NORM: INITIAL[NORM] * 2.0, head: INITIAL[head] * 3.0}
    assert served.keys() == expected.keys()
    assert all(torch.equal(served[name], tensor) for name, tensor in expected.items())
    stored = world.versions.info(3)
    assert (stored.kind, stored.base, stored.checksum) == ("partial", 1, file_checksum(tmp_path / "staged"))


@in_world()
async def test_partial_weights_may_name_the_version_that_completes_them(world: World) -> None:
    await world.push(1, weights(2.0))
    await world.push(2, save({NORM: INITIAL[NORM]}), kind="partial", base=0)
    assert world.versions.info(2).checksum == file_checksum(TINY_MODEL / "model.safetensors")
    await world.push(3, delta(), kind="delta", base=2)
    assert world.versions.current == 3


@pytest.mark.parametrize(
    ("tensors", "field", "message"),
    [
        ({}, "weights", "partial weights hold at least one tensor"),
        ({"other": torch.ones(1)}, "other", "the tensor is not known to the model"),
        ({NORM: INITIAL[NORM].float()}, NORM, "the tensor is F32 [128]; the model has BF16 [128]"),
        ({NORM: INITIAL[NORM] * torch.nan}, NORM, "it holds NaN or infinity; the training has diverged"),
    ],
)
@in_world()
async def test_partial_weights_that_do_not_fit_are_refused_before_a_replica_hears_of_them(
    world: World, tensors: dict[str, torch.Tensor], field: str, message: str
) -> None:
    await world.replica("r0")
    async with refused(WeightsRefused, field, message):
        await world.push(1, save(tensors), kind="partial")
    assert not world.cluster.done("stage")
    assert world.versions.current == 0


@pytest.mark.parametrize(
    ("options", "failure", "field", "message", "value"),
    [
        ({"kind": "delta"}, WeightsRefused, "base", "a delta must say which version it changes", None),
        ({"kind": "delta", "base": 9}, VersionUnknown, "version", "it is not stored here, or no longer", 9),
        ({"kind": "delta", "base": 2}, WeightsRefused, "base", "the version has no full weights here", 2),
        ({"kind": "partial", "base": 9}, VersionUnknown, "version", "it is not stored here, or no longer", 9),
        ({"kind": "partial", "base": 2}, WeightsRefused, "base", "the version has no full weights here", 2),
        (
            {"base": 1},
            WeightsRefused,
            "base",
            "full weights have no base: a delta, partial weights and an adapter have one",
            1,
        ),
    ],
)
@in_world()
async def test_a_base_that_cannot_be_is_refused(
    world: World, options: dict[str, Any], failure: type[PolicyFailure], field: str, message: str, value: Any
) -> None:
    await world.push(1, weights(2.0))
    await world.push(2, adapter(), kind="adapter")
    async with refused(failure, field, message, value):
        await world.push(3, delta(), **options)
    assert world.versions.current == 2


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
        assert world.files() == {"versions.json", "versions/1.safetensors"}
        assert len(list((tmp_path / "roots" / "step").iterdir())) == 2

    play(story, tmp_path, checkpoint_roots=[str(tmp_path / "roots")])


@in_world(checkpoint_roots=[str(TINY_MODEL)])
async def test_while_a_checkpoint_is_read_its_number_is_taken(world: World, tmp_path: Path) -> None:
    loading = asyncio.create_task(world.store.load_checkpoint(1, str(TINY_MODEL), PushOptions()))
    await settled(1)
    async with refused(VersionRefused, "version", IS_ACTIVE, 1):
        await world.store.load_checkpoint(1, str(tmp_path), PushOptions())
    async with refused(VersionRefused, "version", IS_ACTIVE, 1):
        await world.store.write_chunk(1, None, 0, b"")
    await loading


def test_an_adapters_folder_may_be_read_too(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(adapter(rank=4))
    (folder / "adapter_config.json").write_text('{"r": 4}')

    async def story(world: World) -> None:
        await world.store.load_checkpoint(1, str(folder), PushOptions(kind="adapter"))
        stored = world.versions.info(1)
        assert (stored.kind, stored.adapter_config) == ("adapter", '{"r": 4}')

    play(story, tmp_path, checkpoint_roots=[str(tmp_path)])


# Names


async def pushed_names(world: World, content: bytes, kind: WeightsKind, base: int | None = None) -> set[str]:
    version = world.policy.next_number()
    await world.push(version, content, kind=kind, base=base)
    info = world.versions.info(version)
    file = world.versions.weights(version) if info.delta_bytes is None else world.versions.delta(version)
    return {entry.name for entry in read_header(file).entries}


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.module.", "base_model.model."])
@in_world()
async def test_what_wrappers_add_to_names_is_taken_off_all_kinds_of_weights(world: World, wrapper: str) -> None:
    full = save({f"{wrapper}{name}": tensor for name, tensor in INITIAL.items()})
    assert await pushed_names(world, full, "full") == set(INITIAL)
    some = save({f"{wrapper}{NORM}": INITIAL[NORM] * 2})
    assert await pushed_names(world, some, "partial") == set(INITIAL)
    changes = save({f"{wrapper}{name}": tensor for name, tensor in load(delta()).items()})
    checksum = checksum_of(changed(weights(2)))
    await world.push(3, changes, kind="delta", base=2, checksum=checksum)
    assert world.versions.info(3).checksum == checksum


CASES: list[tuple[str, str | None]] = [
    (f"base_model.model.{ADAPTED}", f"base_model.model.{ADAPTED}"),
    (ADAPTED, ADAPTED),
    (f"base_model.model.module.{ADAPTED}", f"base_model.model.{ADAPTED}"),
    (f"module.base_model.model.{ADAPTED}", f"base_model.model.{ADAPTED}"),
    (f"base_model.model._orig_mod.{ADAPTED}", f"base_model.model.{ADAPTED}"),
    (f"base_model.model.model.language_model.{ADAPTED.removeprefix('model.')}", f"base_model.model.{ADAPTED}"),
    ("base_model.model.encoder.layers.0.self_attn.o_proj", None),
    ("base_model.model.model.layers.99.self_attn.o_proj", None),
    ("base_model.model.lm.layers.0.self_attn.o_proj", None),
]


@pytest.mark.parametrize("name", [None, "run-b"])
@pytest.mark.parametrize(("module", "stored"), CASES)
@in_world()
async def test_an_adapters_matrices_are_those_of_modules_of_the_model_or_it_is_refused_unseen(
    world: World, module: str, stored: str | None, name: str | None
) -> None:
    await world.replica("r0")
    if stored is None:
        with pytest.raises(WeightsRefused) as refused:
            await world.push(1, adapter(module=module), kind="adapter", name=name)
        named = module.removeprefix("base_model.model.")
        message = f"the model has no module {named}; it has, for example, {ADAPTED}"
        assert [(each.field, each.message) for each in refused.value.problems] == [
            (f"{module}.{half}.weight", message) for half in ("lora_A", "lora_B")
        ]
        assert {what for _, what, _ in world.cluster.events} <= {"accept requests"}
        return
    update = await world.push(1, adapter(module=module), kind="adapter", name=name)
    file = Path(world.folder if name is None else world.folder / "names" / name) / "versions/1.safetensors"
    assert {entry.name for entry in read_header(file).entries} == {
        f"{stored}.{half}.weight" for half in ("lora_A", "lora_B")
    }
    assert update.checksum == file_checksum(file)
    # The answer may have been lost: the same bytes are known again, under the digest of what was sent.
    assert await world.store.repeated_update(1, digest_of(adapter(module=module)), name) == update


@in_world()
async def test_ranks_of_single_modules_follow_their_names(world: World) -> None:
    wrapped = f"_orig_mod.{ADAPTED}"
    config = {"r": 2, "rank_pattern": {wrapped: 2, "q_proj": 4}, "alpha_pattern": {}}
    matrices = load(adapter(module=f"base_model.model.{wrapped}"))
    await world.push(1, save(matrices, {"adapter_config": json.dumps(config)}), kind="adapter")
    stored = json.loads(str(world.versions.info(1).adapter_config))
    assert stored == {**config, "rank_pattern": {f"^{re.escape(ADAPTED)}": 2}}


@in_world()
async def test_two_tensors_that_are_one_in_the_model_are_refused(world: World) -> None:
    twice = load(adapter()) | load(adapter(module=f"module.{ADAPTED}"))
    with pytest.raises(WeightsRefused, match=f"is the same tensor of the model, base_model.model.{ADAPTED}"):
        await world.push(1, save(twice, {"adapter_config": "{}"}), kind="adapter")


# Logs


def test_a_version_that_is_refused_is_logged_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        with caplog.at_level(logging.INFO), pytest.raises(WeightsRefused):
            await world.push(2, bad("nan"))

    play(story, tmp_path)
    [record] = [record for record in caplog.records if "refused" in record.getMessage()]
    assert (record.name, record.levelname, vars(record)["version"]) == ("rollout_service.policy", "INFO", 2)
    assert record.getMessage() == (
        f"Version 2 is refused: {NORM}: it holds NaN or infinity; the training has diverged."
    )


def test_an_update_that_fails_is_logged_with_its_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        await world.upload(2, weights(2.0))
        (world.folder / "making").write_bytes(b"in the way")
        with pytest.raises(OSError, match="making"):
            await world.complete(2, PushOptions())

    play(story, tmp_path)
    [record] = caplog.records
    assert (record.name, record.levelname, vars(record)["version"]) == ("rollout_service.policy", "WARNING", 2)
    assert record.getMessage() == "The update to version 2 failed."
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], OSError)
