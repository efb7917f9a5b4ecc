"""Adapters of one replica: what is loaded, tried, used and dropped, and what a failure leaves."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deployments.failures import GenerationLost
from deployments.generation.adapters import ADAPTER_FILE, AdapterDoesNotFit, Adapters, LoadedAdapter
from deployments.generation.command_runner import BaseReplaced, CommandRunner
from deployments.policy.commands import LoadedWeights, SetAdapters, StoredFile, VersionPayload
from deployments.policy.node_files import NodeWeights
from rollout_client.weights.checksum import file_checksum
from tests.deployments.generation.scripted_llm import ScriptedLLM, adapter_folder
from tests.deployments.policy.policy_world import ADAPTED, adapter
from tests.virtual_time import run, settled

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow


def test_an_adapter_is_needed_until_no_generation_uses_it_and_the_engine_has_unloaded_it() -> None:
    async def play() -> list[tuple[set[str], list[int]]]:
        llm: Any = ScriptedLLM()
        adapters = Adapters(llm)
        old, new = [await adapters.load(str(version), version, adapter_folder(f"{version}")) for version in (2, 3)]
        adapters.switch_to(old)
        seen = []
        with adapters.used_by_generation(old):
            adapters.switch_to(new)
            await settled()
            seen.append((adapters.needed, list(llm.unloaded)))
        await settled()
        seen.append((adapters.needed, list(llm.unloaded)))
        llm.may_unload.set()
        await settled()
        seen.append((adapters.needed, list(llm.unloaded)))
        return seen

    assert run(play()) == [({"2", "3"}, []), ({"2", "3"}, []), ({"3"}, [1])]


def test_the_current_adapter_stays_loaded_without_generations() -> None:
    async def play() -> tuple[set[str], list[int]]:
        llm: Any = ScriptedLLM()
        llm.may_unload.set()
        adapters = Adapters(llm)
        adapter = await adapters.load("2", 2, adapter_folder("2"))
        adapters.switch_to(adapter)
        with adapters.used_by_generation(adapter):
            await asyncio.sleep(1)
        await settled()
        return adapters.needed, llm.unloaded

    assert run(play()) == ({"2"}, [])


def test_an_adapter_stays_loaded_until_the_last_of_its_generations_has_ended() -> None:
    async def play() -> list[list[int]]:
        llm: Any = ScriptedLLM()
        llm.may_unload.set()
        adapters = Adapters(llm)
        adapter = await adapters.load("2", 2, adapter_folder("2"))
        adapters.switch_to(adapter)
        unloaded = []
        with adapters.used_by_generation(adapter):
            with adapters.used_by_generation(adapter):
                adapters.switch_to(None)
            await settled()
            unloaded.append(list(llm.unloaded))
        await settled()
        unloaded.append(list(llm.unloaded))
        return unloaded

    assert run(play()) == [[], [1]]


def test_two_policies_have_their_adapters_at_once_and_one_that_is_dropped_is_unloaded_after_its_generations() -> None:
    async def play() -> None:
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

    run(play())


def test_an_adapter_is_known_again_by_its_label_and_checksum_until_it_is_given_up() -> None:
    async def play() -> None:
        llm: Any = ScriptedLLM()
        llm.may_unload.set()
        adapters = Adapters(llm)
        adapter = await adapters.load("a/7", 7, adapter_folder("a@7"), "sum")
        adapters.hold(adapter)
        assert (adapters.held("a/7", "sum"), adapters.held("a/7", "other"), adapters.held("a/8", "sum")) == (
            adapter,
            None,
            None,
        )
        adapters.give_up(adapter)
        await settled()
        assert (adapters.held("a/7", "sum"), adapters.needed, llm.unloaded) == (None, set(), [1])

    run(play())


def test_no_two_adapters_have_one_name_in_the_engine_so_that_none_finds_what_another_cached() -> None:
    async def play() -> list[str]:
        llm: Any = ScriptedLLM()
        adapters = Adapters(llm)
        loaded = [await adapters.load(label, 7, adapter_folder("x")) for label in ("7", "a/7", "a/7", "b/7")]
        return [adapter.request.lora_name for adapter in loaded]

    names = run(play())
    assert len(set(names)) == 4


def test_loading_hands_the_folder_to_the_engine() -> None:
    llm: Any = ScriptedLLM()
    adapters = Adapters(llm)
    folder = adapter_folder("2")
    run(adapters.load("2", 2, folder))
    assert llm.calls == [f"add_lora 1 {folder}"]
    assert adapters.current is None


def test_an_adapter_with_a_tensor_that_changes_no_module_is_refused_by_name_and_not_loaded() -> None:
    llm: Any = ScriptedLLM()
    llm.unplaced = [f"base_model.model.{ADAPTED}.lora_{half}.weight" for half in "AB"]
    with pytest.raises(AdapterDoesNotFit, match=rf"has no module for {', '.join(llm.unplaced)}\.$"):
        run(Adapters(llm).load("2", 2, adapter_folder("2")))
    assert llm.calls == []


@pytest.mark.parametrize(("takes_towers", "advised"), [(False, True), (True, False)])
def test_a_refused_adapter_of_a_model_that_sees_is_told_how_vision_towers_take_one(
    takes_towers: bool, advised: bool
) -> None:
    llm: Any = ScriptedLLM()
    llm.unplaced = [f"base_model.model.{ADAPTED}.lora_A.weight"]
    llm.model_config.is_multimodal_model = True
    llm.vllm_config.lora_config.enable_tower_connector_lora = takes_towers
    with pytest.raises(AdapterDoesNotFit) as refused:
        run(Adapters(llm).load("2", 2, adapter_folder("2")))
    advice = (
        "Modules of a vision tower take adapters with enable_tower_connector_lora: true under engine in the config."
    )
    assert str(refused.value).endswith(f".weight. {advice}") is advised


def test_an_adapter_of_the_output_layer_is_refused_with_the_reason() -> None:
    llm: Any = ScriptedLLM()
    llm.unplaced = ["base_model.model.lm_head.lora_A.weight"]
    folder = adapter_folder("2")
    save_file({name: torch.ones(2, 2) for name in llm.unplaced}, folder / ADAPTER_FILE)
    with pytest.raises(AdapterDoesNotFit, match=r"lora_A\.weight\. The output layer takes no adapters\.$"):
        run(Adapters(llm).load("2", 2, folder))


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
        self.changes_nothing = False
        engine: Any = SimpleNamespace(
            adapters=self.adapters,
            canary=SimpleNamespace(try_adapter=self.try_adapter),
            weights=SimpleNamespace(loaded=LoadedWeights(4)),
        )
        unused: Any = None
        self.runner = CommandRunner(engine, unused, unused, self.node)

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

    async def give(self, *payloads: VersionPayload, is_trial: bool = False) -> int:
        done = await self.runner._carry_out(SetAdapters(payloads, 60.0, is_trial))
        self.changes_nothing = done.changes_nothing
        await settled()
        return done.costs.fetched_bytes

    def folders(self) -> set[str]:
        return {folder.name.rpartition("@")[0] for folder in self.node.own_folder.iterdir()}


def play(story: Callable[[World], Coroutine[Any, Any, None]], folder: Path, node_id: str = "node") -> None:
    run(story(World(folder, node_id)))


def test_each_policy_is_tried_once_and_generations_use_all_of_them(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        a, b = world.payload("a", 1), world.payload("b", 7)
        assert await world.give(a) == 0
        assert await world.give(a, b) == 0
        assert (world.adapters.versions, world.tried) == ({"a": 1, "b": 7}, ["a/1", "b/7"])
        assert world.folders() == {"a@1", "b@7"}
        [folder] = [folder for folder in world.node.own_folder.iterdir() if folder.name.startswith("b@7")]
        assert (folder / "adapter_model.safetensors").read_bytes() == adapter()
        assert (folder / "adapter_config.json").read_text() == '{"r": 2}'

    play(story, tmp_path)


def test_a_trial_loads_and_tries_and_leaves_what_generations_use(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        old, new = world.payload("a", 1), world.payload("a", 2)
        await world.give(old)
        await world.give(new, is_trial=True)
        assert (world.adapters.versions, world.tried) == ({"a": 1}, ["a/1", "a/2"])
        await world.give(new)
        assert (world.adapters.versions, world.tried, world.llm.unloaded) == ({"a": 2}, ["a/1", "a/2"], [1])

    play(story, tmp_path)


def test_what_is_not_named_any_more_is_unloaded_and_its_folder_goes_with_the_next_one(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.give(world.payload("a", 1), world.payload("b", 1))
        await world.give(world.payload("b", 1))
        assert (world.adapters.versions, world.llm.unloaded) == ({"b": 1}, [1])
        await world.give(world.payload("b", 2))
        assert world.folders() == {"b@1", "b@2"}
        await world.give(world.payload("b", 3))
        assert world.folders() == {"b@2", "b@3"}

    play(story, tmp_path)


@pytest.mark.parametrize("how", ["fails", "takes too long"])
def test_one_that_cannot_generate_is_dropped_and_the_others_are_used_on(tmp_path: Path, how: str) -> None:
    async def story(world: World) -> None:
        await world.give(world.payload("a", 1))
        if how == "fails":
            world.failing = GenerationLost("broken")
        else:
            world.takes_s = 61.0
        with pytest.raises(GenerationLost):
            await world.give(world.payload("a", 2))
        await settled()
        assert (world.adapters.versions, world.llm.unloaded) == ({"a": 1}, [2])
        world.failing, world.takes_s = None, 0.0
        await world.give(world.payload("a", 2, value=5.0))
        assert world.adapters.versions == {"a": 2}
        [folder] = [folder for folder in world.node.own_folder.iterdir() if folder.name.startswith("a@2")]
        assert (folder / "adapter_model.safetensors").read_bytes() == adapter(5.0), "the file of the refused one"

    play(story, tmp_path)


def test_one_for_other_full_weights_is_refused(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        with pytest.raises(BaseReplaced, match="an adapter for version 3, and the replica has version 4"):
            await world.give(world.payload("a", 1, base=3))
        assert world.llm.calls == []

    play(story, tmp_path)


def test_a_replica_of_another_node_fetches_the_file_and_keeps_no_second_copy(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        payload = world.payload("a", 1)
        assert await world.give(payload) == payload.size_bytes
        assert await world.give(payload) == 0
        assert list((tmp_path / "node" / "versions").iterdir()) == []
        [folder] = world.node.own_folder.iterdir()
        assert (folder / "adapter_model.safetensors").read_bytes() == adapter()

    play(story, tmp_path, node_id="another node")


def test_an_adapter_that_is_too_small_to_be_seen_is_reported_when_it_is_tried(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.unseen = {"b/1"}
        a, b = world.payload("a", 1), world.payload("b", 1)
        seen = []
        for payloads, is_trial in (((a,), False), ((a, b), True), ((a, b), False)):
            await world.give(*payloads, is_trial=is_trial)
            seen.append(world.changes_nothing)
        assert (seen, world.adapters.versions) == ([False, True, False], {"a": 1, "b": 1})

    play(story, tmp_path)


def test_an_adapter_that_fits_no_module_is_refused_and_the_others_stay(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.give(world.payload("a", 1))
        world.llm.unplaced = [f"base_model.model.{ADAPTED}.lora_A.weight"]
        with pytest.raises(AdapterDoesNotFit, match="has no module for base_model"):
            await world.give(world.payload("a", 1), world.payload("b", 1))
        assert (world.adapters.versions, world.tried) == ({"a": 1}, ["a/1"])

    play(story, tmp_path)
