"""The LoRA adapters of one vLLM engine: which policy uses which, which are still needed, and their folders.

vLLM loads an adapter from a folder as PEFT saves it.
"""

import asyncio
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.lora.request import LoRARequest

from deployments.policy.commands import VersionPayload
from rollout_client.weights.safetensors_file import read_header

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

ADAPTER_FILE = "adapter_model.safetensors"


def adapter_folder(folder: Path, payload: VersionPayload, weights: Path, needed: Collection[str]) -> None:
    """Makes `folder` with the adapter in it; removes those beside it that are not `needed` any more.

    The file of the node is copied into it: vLLM reads an adapter again that it has evicted.

    Args:
        needed: names of folders.
    """
    for other in folder.parent.iterdir():
        if other.name not in needed and other.is_dir():
            shutil.rmtree(other)
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(payload.adapter_config or "{}")
    partial = folder / "partial"
    shutil.copyfile(weights, partial)
    partial.replace(folder / ADAPTER_FILE)


_MOST_SHOWN = 5
_TOWER_ADVICE = (
    " Modules of a vision tower take adapters with enable_tower_connector_lora: true under engine in the config."
)
_HEAD_ADVICE = " The output layer takes no adapters."


class AdapterDoesNotFit(Exception):
    """An adapter's tensor changes no module of the model in the engine, or the engine takes no adapters."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter in the engine. No two have the same id there, and none finds in the prefix cache what another made."""

    label: str
    """Label of its tokens: `7`, or `run-b/7` for version 7 of a named policy."""
    version: int
    request: LoRARequest
    checksum: str = ""
    """Checksum of a named policy's adapter: two are the same if they have the same label and checksum."""


class Adapters:
    """An adapter is unloaded once no policy has it and no generation uses it."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self._llm = llm
        self.current: LoadedAdapter | None = None
        """Used by new generations that name no policy; `None` for the model's full weights alone."""
        self._named: dict[str, LoadedAdapter] = {}
        """By the name of a policy, what new generations of it use."""
        self._held: set[LoadedAdapter] = set()
        """Those of `_named`, and those that may become some of them."""
        self._generations: Counter[LoadedAdapter] = Counter()
        """How many ongoing generations use each."""
        self._unloading: dict[asyncio.Task[bool], LoadedAdapter] = {}
        self._ids = count(1)

    @property
    def needed(self) -> set[str]:
        """Names of the folders that must be kept: vLLM evicts an adapter when slots are short, and reads it again."""
        current = set() if self.current is None else {self.current}
        needed = current | self._held | set(self._generations) | set(self._unloading.values())
        return {Path(each.request.lora_path).name for each in needed}

    @property
    def versions(self) -> dict[str, int]:
        """By name, the version of each named policy that new generations use."""
        return {name: adapter.version for name, adapter in self._named.items()}

    def of(self, policy: str | None) -> LoadedAdapter | None:
        """The adapter of new generations of this policy; `None` is the policy without a name."""
        return self.current if policy is None else self._named.get(policy)

    async def load(self, label: str, version: int, folder: Path, checksum: str = "") -> LoadedAdapter:
        """Loads the adapter that PEFT saved in `folder`; no generation uses it yet.

        Raises:
            AdapterDoesNotFit: a tensor of it changes no module of the model; the message names it.
            Exception: what vLLM raises for an adapter that it cannot use.
        """
        await self._refuse_unplaced(folder)
        number = next(self._ids)
        request = LoRARequest(f"{label}#{number}", number, str(folder))
        await self._llm.add_lora(request)
        return LoadedAdapter(label, version, request, checksum)

    async def _refuse_unplaced(self, folder: Path) -> None:
        header = await asyncio.to_thread(read_header, folder / ADAPTER_FILE)
        names = [entry.name for entry in header.entries]
        of_workers = await self._llm.collective_rpc("unplaced_matrices", args=(names,))
        for _, error in of_workers:
            if error is not None:
                raise AdapterDoesNotFit(error)
        # Each worker of a pipeline has a part of the modules.
        unplaced = [name for name in names if all(name in of_worker for of_worker, _ in of_workers)]
        if unplaced:
            shown = ", ".join([*unplaced[:_MOST_SHOWN], *(["..."] if len(unplaced) > _MOST_SHOWN else [])])
            raise AdapterDoesNotFit(f"The model in the engine has no module for {shown}.{self._advice(unplaced)}")

    def _advice(self, unplaced: Sequence[str]) -> str:
        if any("lm_head" in name for name in unplaced):
            return _HEAD_ADVICE
        lora = self._llm.vllm_config.lora_config
        takes_towers = lora is not None and lora.enable_tower_connector_lora
        return _TOWER_ADVICE if self._llm.model_config.is_multimodal_model and not takes_towers else ""

    def hold(self, adapter: LoadedAdapter) -> None:
        """Keeps the adapter of a named policy, until `serve` or `give_up`."""
        self._held.add(adapter)

    def held(self, label: str, checksum: str) -> LoadedAdapter | None:
        return next((each for each in self._held if (each.label, each.checksum) == (label, checksum)), None)

    def switch_to(self, adapter: LoadedAdapter | None) -> None:
        """Makes `adapter` current; ongoing generations end with the one that they began with."""
        previous, self.current = self.current, adapter
        if previous is not None:
            self._unload_unless_needed(previous)

    def serve(self, named: Mapping[str, LoadedAdapter]) -> None:
        """From now on new generations of these named policies use these adapters; all others are dropped."""
        dropped = self._held - set(named.values())
        self._named, self._held = dict(named), set(named.values())
        for adapter in dropped:
            self._unload_unless_needed(adapter)

    def give_up(self, adapter: LoadedAdapter) -> None:
        """Drops one that is held and that no generation uses."""
        self._held.discard(adapter)
        self._unload_unless_needed(adapter)

    @contextmanager
    def used_by_generation(self, adapter: LoadedAdapter | None) -> Iterator[None]:
        """Keeps `adapter` loaded for the length of the block."""
        if adapter is None:
            yield
            return
        self._generations[adapter] += 1
        try:
            yield
        finally:
            self._generations[adapter] -= 1
            if not self._generations[adapter]:
                del self._generations[adapter]
                self._unload_unless_needed(adapter)

    def _unload_unless_needed(self, adapter: LoadedAdapter) -> None:
        if adapter is self.current or adapter in self._held or adapter in self._generations:
            return
        unloading = asyncio.create_task(self._llm.remove_lora(adapter.request.lora_int_id))
        self._unloading[unloading] = adapter
        unloading.add_done_callback(self._unloading.pop)
