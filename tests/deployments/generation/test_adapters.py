"""Which adapters an engine keeps, and when it unloads one."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from deployments.generation.adapters import ADAPTER_FILE, AdapterDoesNotFit, Adapters
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
        with adapters.used_by_generation(old, "g1"):
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
        with adapters.used_by_generation(adapter, "g1"):
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
        with adapters.used_by_generation(adapter, "g1"):
            with adapters.used_by_generation(adapter, "g2"):
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
        with adapters.used_by_generation(a, "g1"), adapters.used_by_generation(b, "g2"):
            assert sorted(adapters.named_generations) == ["g1", "g2"]
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


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, True),
        ({"target_modules": "all-linear"}, True),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, True),
        ({"target_modules": ["q_proj"], "modules_to_save": None}, False),
        (None, False),
    ],
)
def test_an_adapter_that_changes_the_output_layer_is_known_by_its_config(
    tmp_path: Path, config: dict[str, Any] | None, changes: bool
) -> None:
    (tmp_path / ADAPTER_FILE).write_bytes(adapter())
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    llm: Any = ScriptedLLM()
    assert run(Adapters(llm).load("2", 2, tmp_path)).changes_head == changes
