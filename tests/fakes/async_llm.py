"""vLLM's `AsyncLLM`: for what changes weights, and for what generates. Each records its calls and answers as told."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

from vllm.logprobs import FlatLogprobs, Logprob
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import SamplingParams

from deployments.generation.adapters import ADAPTER_FILE
from tests.deployments.policy.policy_world import adapter


def adapter_folder(name: str) -> Path:
    """A new folder of this name with an adapter in it, as `Adapters.load` takes it."""
    folder = Path(mkdtemp()) / name
    folder.mkdir()
    (folder / ADAPTER_FILE).write_bytes(adapter())
    return folder


class ScriptedEngineCore:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls
        self.pause_s = 0.0
        """How long a pause waits for generations."""

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self._calls.append(f"pause mode={mode} clear_cache={clear_cache}")
        await asyncio.sleep(self.pause_s)


class ScriptedLLM:
    """`results` are those of `collective_rpc` by method: a list over the workers for each call."""

    def __init__(self, **results: Sequence[list[Any]]) -> None:
        self.calls: list[str] = []
        self.meanwhile: Callable[[str], None] = lambda _: None
        """Called with the method of each call of the workers."""
        self.engine_core = ScriptedEngineCore(self.calls)
        self.may_unload = asyncio.Event()
        self.unloaded: list[int] = []
        self.unplaced: list[str] = []
        """Tensors of adapters that no module of the model takes."""
        self.model_config = SimpleNamespace(is_multimodal_model=False)
        lora = SimpleNamespace(enable_tower_connector_lora=False)
        self.vllm_config = SimpleNamespace(lora_config=lora, kv_transfer_config=None)
        self._results = {method: list(of_method) for method, of_method in results.items()}

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "unplaced_matrices":
            return [([name for name in args[0] if name in self.unplaced], None)]
        self.calls.append(" ".join([method, *map(str, args)]))
        self.meanwhile(method)
        await asyncio.sleep(0)
        return self._results[method].pop(0)

    async def update_weight_version(self, version: str) -> None:
        self.calls.append(f"label {version}")

    async def start_weight_update(self) -> None:
        self.calls.append("start_weight_update")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def reset_encoder_cache(self) -> None:
        self.calls.append("reset_encoder_cache")

    async def add_lora(self, adapter: LoRARequest) -> None:
        self.calls.append(f"add_lora {adapter.lora_int_id} {adapter.lora_path}")

    async def remove_lora(self, adapter_id: int) -> bool:
        await self.may_unload.wait()
        self.unloaded.append(adapter_id)
        return True

    async def abort(self, engine_ids: Sequence[str]) -> None:
        self.calls.append(f"abort {' '.join(engine_ids)}")


Step = str | Exception | Callable[[], Awaitable[None] | None]
"""A text that is generated, a failure, or what happens meanwhile."""


NAMES_ARE_IDS: Any = SimpleNamespace(external_req_ids=SimpleNamespace(get=lambda name, _: [name]))
"""An output processor whose requests have in the core the ids that their callers gave them."""


class GeneratingLLM:
    """Each request of the engine goes through the next of `scripts`; "!" in a text ends the request as aborted."""

    def __init__(self, *scripts: Sequence[Step]) -> None:
        self.scripts = list(scripts)
        self.prompts: list[list[int]] = []
        self.aborted: list[str] = []
        self.version = "0"
        self.engine_core = self
        self.output_processor = NAMES_ARE_IDS
        self.ended: list[list[str]] = []
        """The requests of each call that has ended some in the core."""

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))

    async def abort(self, engine_ids: Sequence[str], internal: bool = False) -> None:
        self.aborted += engine_ids

    async def call_utility_async(self, _method: str, engine_ids: Sequence[str]) -> list[str]:
        self.ended.append(sorted(engine_ids))
        return []

    async def generate(
        self, prompt: Any, _params: SamplingParams, _engine_id: str, **_options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        self.prompts.append(prompt["prompt_token_ids"])
        made = 0
        for step in self.scripts.pop(0):
            await asyncio.sleep(0)
            if isinstance(step, Exception):
                raise step
            if not isinstance(step, str):
                if (meanwhile := step()) is not None:
                    await meanwhile
                continue
            ends = {"!": "abort", ".": "stop"}.get(step[-1])
            text = step.rstrip("!.")
            made += len(text)
            spans = [WeightVersionSpan(self.version, 0, made)] if ends else None
            ids, logprobs = list(map(ord, text)), FlatLogprobs()
            for token_id in ids:
                logprobs.append({token_id: Logprob(-0.5)})
            completion = CompletionOutput(0, text, ids, None, logprobs, finish_reason=ends, weight_versions=spans)
            yield RequestOutput("id", None, prompt["prompt_token_ids"], None, [completion], ends is not None)
