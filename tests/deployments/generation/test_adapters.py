"""Which adapters an engine keeps, and when it unloads one."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from deployments.generation.adapters import Adapters
from tests.deployments.generation.scripted_llm import ScriptedLLM
from tests.virtual_time import run, settled

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow


def test_an_adapter_is_needed_until_no_generation_uses_it_and_the_engine_has_unloaded_it() -> None:
    async def play() -> list[tuple[set[int], list[int]]]:
        llm: Any = ScriptedLLM()
        adapters = Adapters(llm)
        old, new = [await adapters.load(version, Path("/folder")) for version in (2, 3)]
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

    assert run(play()) == [({2, 3}, []), ({2, 3}, []), ({3}, [2])]


def test_the_current_adapter_stays_loaded_without_generations() -> None:
    async def play() -> tuple[set[int], list[int]]:
        llm: Any = ScriptedLLM()
        llm.may_unload.set()
        adapters = Adapters(llm)
        adapter = await adapters.load(2, Path("/folder"))
        adapters.switch_to(adapter)
        with adapters.used_by_generation(adapter):
            await asyncio.sleep(1)
        await settled()
        return adapters.needed, llm.unloaded

    assert run(play()) == ({2}, [])


def test_an_adapter_stays_loaded_until_the_last_of_its_generations_has_ended() -> None:
    async def play() -> list[list[int]]:
        llm: Any = ScriptedLLM()
        llm.may_unload.set()
        adapters = Adapters(llm)
        adapter = await adapters.load(2, Path("/folder"))
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

    assert run(play()) == [[], [2]]


def test_loading_hands_the_folder_to_the_engine() -> None:
    llm: Any = ScriptedLLM()
    adapters = Adapters(llm)
    run(adapters.load(2, Path("/folder")))
    assert llm.calls == ["add_lora 2 /folder"]
    assert adapters.current is None


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
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    async def play() -> list[bool]:
        llm: Any = ScriptedLLM()
        adapters = Adapters(llm)
        return [adapters.changes_head(None), adapters.changes_head(await adapters.load(2, tmp_path))]

    assert run(play()) == [False, changes]
