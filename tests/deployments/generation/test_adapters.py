"""Adapters of one replica: what is loaded, tried, used and dropped, and what a failure leaves."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch
from safetensors.torch import save_file

from deployments.failures import GenerationLost
from deployments.generation.adapters import ADAPTER_FILE, AdapterDoesNotFit, Adapters, LoadedAdapter
from deployments.generation.command_runner import CommandRunner
from deployments.policy.commands import (
    CommandReport,
    LoadedWeights,
    ReplicaRegistration,
    SetAdapters,
    StoredFile,
    VersionPayload,
)
from deployments.policy.node_files import NodeWeights
from rollout_client.weights.checksum import file_checksum
from tests.deployments.policy.policy_world import ADAPTED, adapter
from tests.fakes.async_llm import ScriptedLLM, adapter_folder
from tests.fakes.command_source import ScriptedCommands
from tests.virtual_time import settled

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow


async def test_a_replaced_adapter_is_needed_until_the_engine_has_unloaded_it() -> None:
    llm: Any = ScriptedLLM()
    adapters = Adapters(llm)
    old, new = [await adapters.load(str(version), version, adapter_folder(f"{version}")) for version in (2, 3)]
    adapters.switch_to(old)
    with adapters.used_by_generation(old):
        adapters.switch_to(new)
        await settled()
    await settled()
    assert (adapters.needed, llm.unloaded) == ({"2", "3"}, [])
    llm.may_unload.set()
    await settled()
    assert (adapters.needed, llm.unloaded) == ({"3"}, [1])


async def test_an_adapter_is_unloaded_once_it_is_neither_current_nor_used() -> None:
    llm: Any = ScriptedLLM()
    llm.may_unload.set()
    adapters = Adapters(llm)
    adapter = await adapters.load("2", 2, adapter_folder("2"))
    adapters.switch_to(adapter)
    with adapters.used_by_generation(adapter):
        await settled()
    await settled()
    assert (adapters.needed, llm.unloaded) == ({"2"}, [])
    with adapters.used_by_generation(adapter):
        with adapters.used_by_generation(adapter):
            adapters.switch_to(None)
        await settled()
        assert llm.unloaded == []
    await settled()
    assert llm.unloaded == [1]


async def test_a_policys_dropped_adapter_is_unloaded_after_its_generations() -> None:
    llm: Any = ScriptedLLM()
    llm.may_unload.set()
    adapters = Adapters(llm)
    a, b = [await adapters.load(f"{name}/7", 7, adapter_folder(f"{name}@7")) for name in ("a", "b")]
    for each in (a, b):
        adapters.hold(each)
    assert (adapters.versions, adapters.of("a")) == ({}, None)
    adapters.serve({"a": a, "b": b})
    assert (adapters.of("a"), adapters.of("b"), adapters.of("c"), adapters.of(None)) == (a, b, None, None)
    with adapters.used_by_generation(a), adapters.used_by_generation(b):
        adapters.serve({"b": b})
        await settled()
        assert (adapters.versions, adapters.needed, llm.unloaded) == ({"b": 7}, {"a@7", "b@7"}, [])
    await settled()
    assert (adapters.needed, llm.unloaded) == ({"b@7"}, [1])


async def test_no_two_adapters_share_a_name_and_so_none_finds_the_others_cache() -> None:
    llm: Any = ScriptedLLM()
    adapters = Adapters(llm)
    loaded = [await adapters.load(label, 7, adapter_folder("x")) for label in ("7", "a/7", "a/7", "b/7")]
    assert len({adapter.request.lora_name for adapter in loaded}) == 4


TOWERS = " Modules of a vision tower take adapters with enable_tower_connector_lora: true under engine in the config."


@pytest.mark.parametrize(
    ("unplaced", "sees", "takes_towers", "advice"),
    [
        ([f"base_model.model.{ADAPTED}.lora_{half}.weight" for half in "AB"], False, False, ""),
        ([f"base_model.model.{ADAPTED}.lora_A.weight"], True, False, TOWERS),
        ([f"base_model.model.{ADAPTED}.lora_A.weight"], True, True, ""),
        (["base_model.model.lm_head.lora_A.weight"], False, False, " The output layer takes no adapters."),
    ],
)
async def test_an_adapter_that_changes_no_module_is_refused_with_its_tensors(
    unplaced: list[str], sees: bool, takes_towers: bool, advice: str
) -> None:
    llm: Any = ScriptedLLM()
    llm.unplaced = unplaced
    llm.model_config.is_multimodal_model = sees
    llm.vllm_config.lora_config.enable_tower_connector_lora = takes_towers
    folder = adapter_folder("2")
    save_file({name: torch.ones(2, 2) for name in unplaced}, folder / ADAPTER_FILE)
    with pytest.raises(AdapterDoesNotFit) as refused:
        await Adapters(llm).load("2", 2, folder)
    assert str(refused.value).endswith(f"has no module for {', '.join(unplaced)}.{advice}")
    assert llm.calls == []


class World:
    """One replica, with full weights of version 4, on the store's node or on another one."""

    def __init__(self, folder: Path, node_id: str = "node") -> None:
        self.folder = folder
        self.llm = ScriptedLLM()
        self.llm.may_unload.set()
        llm: Any = self.llm
        self.adapters = Adapters(llm)
        self.node = NodeWeights(folder / "node", node_id, self.read_weights)
        self.node.join()
        self.stored: dict[tuple[int, str], Path] = {}
        """The files of payloads, by version and checksum."""
        self.tried: list[str] = []
        self.failing: Exception | None = None
        self.takes_s = 0.0
        self.unseen: set[str] = set()
        """Labels of adapters that change no log-probability."""
        weights = SimpleNamespace(
            loaded=LoadedWeights(4), is_on_trial=False, in_transfer=False, held_s=0.0, release=AsyncMock()
        )
        canary = SimpleNamespace(try_adapter=self.try_adapter)
        engine: Any = SimpleNamespace(adapters=self.adapters, canary=canary, weights=weights, is_alive=self.is_alive)
        self.commands = ScriptedCommands()
        runner = CommandRunner(
            engine, self.commands, lambda loaded: ReplicaRegistration("replica", None, 1, loaded), self.node
        )
        self.running = asyncio.create_task(runner.run())

    async def is_alive(self) -> bool:
        return True

    async def read_weights(self, version: int, checksum: str, offset: int, count: int) -> bytes:
        """Reads the file in the store's folder, as another node does."""
        return self.stored[version, checksum].read_bytes()[offset : offset + count]

    async def try_adapter(self, loaded: LoadedAdapter) -> bool:
        assert self.adapters.of(loaded.label.partition("/")[0]) is not loaded, "generations use it already"
        self.tried.append(loaded.label)
        await asyncio.sleep(self.takes_s)
        if self.failing is not None:
            raise self.failing
        return loaded.label in self.unseen

    def payload(self, name: str, version: int, value: float = 1.0, base: int = 4) -> VersionPayload:
        path = self.folder / f"{name}-{version}-{value}.safetensors"
        path.write_bytes(adapter(value))
        file = StoredFile(str(path), "node", path.stat().st_ino, path.stat().st_mtime_ns, is_copied=True)
        size, checksum = path.stat().st_size, file_checksum(path)
        self.stored[version, checksum] = path
        return VersionPayload(version, "adapter", size, checksum, file, adapter_config='{"r": 2}', name=name, base=base)

    async def give(self, *payloads: VersionPayload, is_trial: bool = False) -> CommandReport:
        report = await self.commands.carried_out(SetAdapters(payloads, 60.0, is_trial))
        await settled()
        return report

    def folders(self) -> dict[str, Path]:
        return {folder.name.rpartition("@")[0]: folder for folder in self.node.own_folder.iterdir()}


async def test_each_policy_is_tried_once_and_generations_use_all_of_them(tmp_path: Path) -> None:
    world = World(tmp_path)
    a, b = world.payload("a", 1), world.payload("b", 7)
    assert (await world.give(a)).costs.fetched_bytes == 0
    assert (await world.give(a, b)).costs.fetched_bytes == 0
    assert (world.adapters.versions, world.tried) == ({"a": 1, "b": 7}, ["a/1", "b/7"])
    folders = world.folders()
    assert set(folders) == {"a@1", "b@7"}
    assert (folders["b@7"] / "adapter_model.safetensors").read_bytes() == adapter()
    assert (folders["b@7"] / "adapter_config.json").read_text() == '{"r": 2}'


async def test_a_trial_loads_and_tries_and_leaves_what_generations_use(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.unseen = {"a/2"}
    old, new = world.payload("a", 1), world.payload("a", 2)
    reports = [await world.give(old), await world.give(new, is_trial=True)]
    assert (world.adapters.versions, world.tried) == ({"a": 1}, ["a/1", "a/2"])
    reports.append(await world.give(new))
    assert (world.adapters.versions, world.tried, world.llm.unloaded) == ({"a": 2}, ["a/1", "a/2"], [1])
    assert [report.changes_nothing for report in reports] == [False, True, False]


async def test_what_is_not_named_any_more_is_unloaded_and_its_folder_goes_later(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.give(world.payload("a", 1), world.payload("b", 1))
    await world.give(world.payload("b", 1))
    assert (world.adapters.versions, world.llm.unloaded) == ({"b": 1}, [1])
    await world.give(world.payload("b", 2))
    assert set(world.folders()) == {"b@1", "b@2"}
    await world.give(world.payload("b", 3))
    assert set(world.folders()) == {"b@2", "b@3"}


@pytest.mark.parametrize("how", ["fails", "takes too long"])
async def test_one_that_cannot_generate_is_dropped_and_the_others_are_used_on(tmp_path: Path, how: str) -> None:
    world = World(tmp_path)
    await world.give(world.payload("a", 1))
    if how == "fails":
        world.failing = GenerationLost("broken")
    else:
        world.takes_s = 61.0
    report = await world.give(world.payload("a", 2))
    assert (str(report.error).partition(":")[0], report.broken) == ("GenerationLost", False)
    assert (world.adapters.versions, world.llm.unloaded) == ({"a": 1}, [2])
    world.failing, world.takes_s = None, 0.0
    await world.give(world.payload("a", 2, value=5.0))
    assert world.adapters.versions == {"a": 2}
    made = world.folders()["a@2"] / "adapter_model.safetensors"
    assert made.read_bytes() == adapter(5.0), "the file of the refused one"


async def test_one_for_other_weights_or_modules_is_refused_and_the_rest_stays(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.give(world.payload("a", 1))
    refused = await world.give(world.payload("b", 1, base=3))
    assert refused.error == "BaseReplaced: It is an adapter for version 3, and the replica has version 4."
    world.llm.unplaced = [f"base_model.model.{ADAPTED}.lora_A.weight"]
    refused = await world.give(world.payload("a", 1), world.payload("b", 1))
    assert "has no module for base_model" in str(refused.error)
    assert (world.adapters.versions, world.tried, len(world.llm.calls)) == ({"a": 1}, ["a/1"], 1)


async def test_a_replica_of_another_node_fetches_the_file_and_keeps_one_copy(tmp_path: Path) -> None:
    world = World(tmp_path, node_id="another node")
    payload = world.payload("a", 1)
    assert [(await world.give(payload)).costs.fetched_bytes for _ in range(2)] == [payload.size_bytes, 0]
    assert list((tmp_path / "node" / "versions").iterdir()) == []
    [folder] = world.node.own_folder.iterdir()
    assert (folder / "adapter_model.safetensors").read_bytes() == adapter()
