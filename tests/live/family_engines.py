"""Pushes tiny models of several families to engines, one after the other, in a process of its own.

    python -m tests.live.family_engines qwen3 gemma2    # one line of JSON for each

The worker runs in this process too: it is the same one that the service runs in a process of its own, with the same
extension and plugin, and starts in seconds.
"""

import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from vllm import LLM
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt

from benchmarks.reference_model import logprobs_of
from deployments.generation.engine import WORKER_EXTENSION
from deployments.generation.engine_requests import scored_prompt_of, scoring_params
from deployments.policy.assembly import write_completed
from deployments.policy.weight_checks import layout_of, validate_full, validate_partial
from deployments.protocols.generation import SamplingOptions, ScoringRequest
from rollout_client.weights.sources import full_weights
from tests.model_families import dtype_of, random_model, save_with_tokenizer

SEQUENCES = [[5, 17, 8, 31, 9, 2], list(range(100, 160)), [(7 * place) % 262 for place in range(200)]]
POLL_S = 0.005
KV_CACHE_BYTES = 2**25
TRAINED = ("model.layers.1", "model.norm")
"""The modules that the partial push changes."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Log-probabilities of all tokens of `SEQUENCES`, by the engine and by transformers."""

    largest: float
    """Difference (absolute) between the two."""
    mean: float
    change: float
    """Mean difference (absolute) of the engine's from those before the push."""
    checksum: str
    """Of the weights in the worker's memory."""


class FamilyEngine:
    """Takes modules the way that pushes go, from the client to the worker, without the calls between them."""

    def __init__(self, family: str, folder: Path) -> None:
        self.initial = random_model(family, 0)
        self._folder = save_with_tokenizer(self.initial, folder)
        self._layout = layout_of(folder)
        self._version = 0
        self._llm = LLM(
            str(folder),
            dtype="float32" if dtype_of(family) == torch.float32 else "bfloat16",
            max_model_len=512,
            max_num_seqs=8,
            enable_chunked_prefill=False,
            max_num_batched_tokens=512,
            enforce_eager=True,
            worker_extension_cls=WORKER_EXTENSION,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
        )
        self._said = self.scored()

    def push(self, model: Any, is_partial: bool = False) -> None:
        base, self._version = self._version, self._version + 1
        pushed, full = self._folder / "pushed", self._folder / f"version-{self._version}"
        with pushed.open("wb") as file:
            file.writelines(full_weights(model, self._layout, is_partial).blocks())
        if is_partial:
            validate_partial(pushed, self._layout)
            write_completed(self._folder / f"version-{base}", pushed, full)
        else:
            pushed.rename(full)
        validate_full(full, self._layout)
        self._llm.collective_rpc("begin_staging", args=(str(full),))
        while not self._rpc("staged"):
            time.sleep(POLL_S)
        self._rpc("swap_staged")

    def _rpc(self, method: str) -> Any:
        [(result, error)] = self._llm.collective_rpc(method)
        assert error is None, error
        return result

    def compare(self, model: Any) -> Comparison:
        before, self._said = self._said, self.scored()
        expected = torch.cat([logprobs_of(model, ids) for ids in SEQUENCES])
        differences = (self._said - expected).abs()
        change = (self._said - before).abs().mean().item()
        return Comparison(differences.max().item(), differences.mean().item(), change, self._checksum())

    def _checksum(self) -> str:
        [checksum] = self._llm.collective_rpc("checksum_weights", args=(math.inf,))
        return str(checksum)

    def scored(self) -> torch.Tensor:
        requests = [ScoringRequest(f"{number}", ids, 1, (), SamplingOptions()) for number, ids in enumerate(SEQUENCES)]
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in SEQUENCES]
        params = [scoring_params(request, False) for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        scores = [scored_prompt_of(*each, None, False) for each in zip(requests, outputs, strict=True)]
        return torch.cat([torch.tensor(list(score.prompt_logprobs)) for score in scores])

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        cleanup_dist_env_and_memory()


def with_layer_of(model: Any, other: Any) -> Any:
    """`model` with the modules `TRAINED` of `other`, and the rest frozen."""
    model.requires_grad_(False)
    for name in TRAINED:
        model.get_submodule(name).load_state_dict(other.get_submodule(name).state_dict())
        model.get_submodule(name).requires_grad_(True)
    return model


def compared(family: str, folder: Path) -> dict[str, Comparison]:
    """For the initial weights, a push of all weights, one of the trained weights only, and the initial ones again."""
    # vLLM collects garbage several times while an engine starts and ends: not what was imported.
    gc.freeze()
    engine = FamilyEngine(family, folder)
    try:
        found = {"initial": engine.compare(engine.initial)}
        model, other = random_model(family, 1), random_model(family, 2)
        engine.push(model)
        found["full"] = engine.compare(model)
        trained = with_layer_of(model, other)
        engine.push(trained, is_partial=True)
        found["partial"] = engine.compare(trained)
        engine.push(engine.initial)
        found["again"] = engine.compare(engine.initial)
        return found
    finally:
        engine.close()


def main(families: list[str], write: Callable[[str], Any]) -> None:
    for family in families:
        with TemporaryDirectory() as folder:
            found = compared(family, Path(folder))
        write(json.dumps({"family": family, **{name: asdict(each) for name, each in found.items()}}) + "\n")


if __name__ == "__main__":
    # vLLM writes to standard output too.
    with os.fdopen(os.dup(1), "w", buffering=1) as lines:
        os.dup2(2, 1)
        main(sys.argv[1:], lines.write)
