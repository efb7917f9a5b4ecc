"""The LoRA adapters of one vLLM engine: which one is current, and which ones are still needed."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.lora.request import LoRARequest

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class Adapters:
    """An adapter is unloaded once it is neither current nor used by a generation."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self._llm = llm
        self.current: LoRARequest | None = None
        """New generations use it; `None` for the model's full weights alone."""
        self._generations: Counter[int] = Counter()
        """Ongoing generations by the version of their adapter."""
        self._unloading: dict[asyncio.Task[bool], int] = {}
        self._with_head: set[int] = set()
        """Versions of adapters that change the output layer."""

    @property
    def needed(self) -> set[int]:
        """Versions whose files must be kept: vLLM evicts an adapter when slots are short, and reads its files again."""
        current = set() if self.current is None else {self.current.lora_int_id}
        return current | set(self._generations) | set(self._unloading.values())

    async def load(self, version: int, folder: Path) -> LoRARequest:
        """Loads the adapter that PEFT saved in `folder`; the current one stays current.

        Raises:
            Exception: what vLLM raises for an adapter that it cannot use (rank, modules, `enable_lora` not set).
        """
        adapter = LoRARequest(f"policy-{version}", version, str(folder))
        await self._llm.add_lora(adapter)
        if changes_head(folder / "adapter_config.json"):
            self._with_head.add(version)
        return adapter

    def changes_head(self, adapter: LoRARequest | None) -> bool:
        """Whether the adapter changes the model's output layer."""
        return adapter is not None and adapter.lora_int_id in self._with_head

    def switch_to(self, adapter: LoRARequest | None) -> None:
        """Makes `adapter` current; ongoing generations end with the one that they began with."""
        previous, self.current = self.current, adapter
        if previous is not None:
            self._unload_unless_needed(previous)

    @contextmanager
    def used_by_generation(self, adapter: LoRARequest | None) -> Iterator[None]:
        """Keeps `adapter` loaded for the length of the block."""
        if adapter is None:
            yield
            return
        self._generations[adapter.lora_int_id] += 1
        try:
            yield
        finally:
            self._generations[adapter.lora_int_id] -= 1
            self._unload_unless_needed(adapter)

    def _unload_unless_needed(self, adapter: LoRARequest) -> None:
        if adapter is not self.current and not self._generations[adapter.lora_int_id]:
            del self._generations[adapter.lora_int_id]
            self._with_head.discard(adapter.lora_int_id)
            unloading = asyncio.create_task(self._llm.remove_lora(adapter.lora_int_id))
            self._unloading[unloading] = adapter.lora_int_id
            unloading.add_done_callback(self._unloading.pop)


def changes_head(config: Path) -> bool:
    """Whether PEFT's `adapter_config.json` names the output layer among the modules that it changes."""
    described = json.loads(config.read_text()) if config.is_file() else {}
    modules = [described.get(name) or () for name in ("target_modules", "modules_to_save")]
    return any("lm_head" in named or named == "all-linear" for named in modules)
