"""What the plugin does to the environment of vLLM's processes."""

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.lora.ops.torch_ops import lora_ops
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample import sampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

from deployments.upstream.vllm.plugin import (
    PromptLogits,
    keep_adapters_from_tokens_without,
    keep_top_logprobs_beside_scores,
    leave_out_head_adapters_of_prompts,
    pack_experts_at_each_load,
    preload_by_name,
)

OPENMP = (Path(torch.__file__).parent / "lib" / "libgomp.so.1").resolve()
PRINT_LOADED = "print(open('/proc/self/maps').read())"


def test_openmp_in_a_folder_with_a_space_is_preloaded_without_an_error_of_the_linker(tmp_path: Path) -> None:
    library = tmp_path / "a folder" / OPENMP.name
    library.parent.mkdir()
    library.symlink_to(OPENMP)
    environment = dict(os.environ)
    preload_by_name(library, environment)
    ended = subprocess.run([sys.executable, "-c", PRINT_LOADED], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert str(OPENMP) in ended.stdout


def test_other_libraries_stay_preloaded_and_other_folders_searched() -> None:
    environment = {"LD_PRELOAD": "/lib/libtcmalloc.so", "LD_LIBRARY_PATH": "/opt/lib"}
    preload_by_name(Path("/a folder/libgomp.so.1"), environment)
    assert environment == {"LD_PRELOAD": "/lib/libtcmalloc.so:libgomp.so.1", "LD_LIBRARY_PATH": "/a folder:/opt/lib"}


def test_a_folder_without_a_space_is_left_to_vllm() -> None:
    environment = dict[str, str]()
    preload_by_name(Path("/folder/libgomp.so.1"), environment)
    assert environment == {}


def test_an_openmp_library_that_the_user_preloads_is_kept() -> None:
    environment = {"LD_PRELOAD": "/opt/libiomp5.so"}
    preload_by_name(Path("/a folder/libgomp.so.1"), environment)
    assert environment == {"LD_PRELOAD": "/opt/libiomp5.so"}


def test_an_adapter_is_added_to_its_own_tokens_only() -> None:
    operations = ModuleType("operations", "vLLM's, as they come")
    vars(operations).update(vars(importlib.reload(lora_ops)))
    keep_adapters_from_tokens_without(operations)
    keep_adapters_from_tokens_without(operations)
    adapters = torch.tensor([[[[1.0, 2.0]]], [[[30.0, 40.0]]]])
    hidden, shrunk = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]), torch.zeros(3, 1)
    indices = torch.tensor([0, -1, 1])
    operations.bgmv_shrink(hidden, adapters, shrunk, indices, 2.0)
    assert shrunk.tolist() == [[6.0], [0.0], [140.0]]
    outputs = torch.full((3, 2), 5.0)
    operations.bgmv_expand(torch.ones(3, 1), adapters.transpose(2, 3), outputs, indices, add_inputs=True)
    assert outputs.tolist() == [[6.0, 7.0], [5.0, 5.0], [35.0, 45.0]]
    operations.bgmv_expand_slice(torch.ones(3, 1), adapters.transpose(2, 3), outputs, indices, 0, 2, add_inputs=True)
    assert outputs.tolist() == [[7.0, 9.0], [5.0, 5.0], [65.0, 85.0]]


class ScriptedPunica:
    """Adds 10 to the logits of each row."""

    def add_lora_logits(self, logits: torch.Tensor, *_weights: object) -> torch.Tensor:
        return logits.add_(10.0)


class ScriptedHead(LogitsProcessorWithLoRA):
    """vLLM's, with an output layer that leaves the hidden states as they are."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        as_they_are = SimpleNamespace(
            _apply_head=lambda _head, hidden, _bias: hidden.clone(), _gather_logits=lambda logits: logits, vocab_size=3
        )
        vars(self).update(base_layer=as_they_are, punica_wrapper=ScriptedPunica(), sharded_to_full_mapping_gpu=None)
        vars(self).update(lora_a_stacked=None, lora_b_stacked=None)

    def compute(self, hidden: torch.Tensor) -> list[list[float]]:
        logits = self._get_logits(hidden, SimpleNamespace())  # type: ignore[arg-type]
        assert logits is not None
        return logits.tolist()


def test_adapters_of_the_output_layer_are_added_to_tokens_to_be_generated_and_to_no_row_of_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ScriptedHead, "_get_logits", LogitsProcessorWithLoRA._get_logits, raising=False)

    class Runner:
        def load_lora_model(self, model: ScriptedHead) -> ScriptedHead:
            self.model = model
            return model

        def _get_prompt_logprobs_dict(self, hidden: torch.Tensor) -> list[list[float]]:
            return self.model.compute(hidden)

    for _ in range(2):
        leave_out_head_adapters_of_prompts(Runner, ScriptedHead)
    runner, of_two_rows = Runner(), torch.ones(2, 3)
    head = runner.load_lora_model(ScriptedHead())
    assert head.compute(of_two_rows) == [[11.0] * 3] * 2
    assert runner._get_prompt_logprobs_dict(of_two_rows) == [[1.0] * 3] * 2
    assert head.compute(of_two_rows) == [[11.0] * 3] * 2


def test_the_rows_of_prompts_are_known_in_vllms_newer_model_runner_too(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[bool]()

    def compute(_self: PromptLogprobsWorker) -> None:
        said.append(PromptLogits.are_computed)

    names = ("compute_prompt_logprobs", "compute_prompt_token_id_logprobs")
    for name in names:
        monkeypatch.setattr(PromptLogprobsWorker, name, compute)

    class Runner:
        def load_lora_model(self) -> None:
            """Loads nothing."""

    leave_out_head_adapters_of_prompts(Runner, type("Head", (), {"_get_logits": None}))
    Runner().load_lora_model()
    worker: Any = object.__new__(PromptLogprobsWorker)
    for name in names:
        getattr(worker, name)()
    assert (said, PromptLogits.are_computed) == ([True, True], False)


def test_a_call_beside_the_score_of_a_whole_context_has_its_most_probable_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # vLLM's own compiles for seconds; nothing here depends on it.
    monkeypatch.setattr(sampler, "batched_count_greater_than", lambda logprobs, _sampled: torch.zeros(len(logprobs)))
    originals = ("forward", "gather_specific_token_logprobs")
    vllms: Any = type("Fresh", (Sampler,), {name: inspect.unwrap(getattr(Sampler, name)) for name in originals})
    logits = torch.tensor([[1.0, 4.0, 3.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
    logprobs = logits.log_softmax(dim=-1)

    def tensors(named: dict[int, list[int]], most: int | None) -> LogprobsTensors:
        metadata = SimpleNamespace(
            max_num_logprobs=most,
            logprob_token_ids=named,
            temperature=None,
            all_greedy=True,
            all_random=False,
            no_penalties=True,
            bad_words_token_ids={},
            allowed_token_ids_mask=None,
            logitsprocs=SimpleNamespace(non_argmax_invariant=[], argmax_invariant=[]),
            thinking_budget_state_holder=None,
            output_token_ids=[],
            spec_token_ids=[],
        )
        # As vLLM's model runner calls it.
        sampled = vllms("processed_logprobs")(logits=logits.clone(), sampling_metadata=metadata)
        found: LogprobsTensors = sampled.logprobs_tensors
        return found

    assert tensors({1: [0]}, most=2).logprob_token_ids.tolist() == [[1, 0], [3, 0]], "vLLM does so no more"
    for _ in range(2):
        keep_top_logprobs_beside_scores(vllms)
    beside = tensors({1: [0]}, most=2)
    assert beside.logprob_token_ids.tolist() == [[1, 1, 2], [3, 0, 0]]
    expected = [[logprobs[0, 1], logprobs[0, 1], logprobs[0, 2]], [logprobs[1, 3], logprobs[1, 0], -torch.inf]]
    assert torch.equal(beside.logprobs, torch.tensor(expected))
    assert tensors({1: [0, 2, 3]}, most=1).logprob_token_ids.tolist() == [[1, 1, 0, 0], [3, 0, 2, 3]]
    assert tensors({1: [0]}, most=0).logprob_token_ids.tolist() == [[1, 0], [3, 0]]
    assert tensors({}, most=1).logprob_token_ids.tolist() == [[1, 1], [3, 3]]


class ScriptedExperts:
    """Packs as vLLM's method for experts does: at the first load only."""

    def __init__(self) -> None:
        self.moe_kernel: SimpleNamespace | None = None

    def _setup_kernel(self, layer: SimpleNamespace, w13: str, w2: str) -> None:
        layer.weights = [w13, w2]
        if self.moe_kernel is None:
            self.moe_kernel = SimpleNamespace(fused_experts=self)
            self.process_weights_after_loading(layer)

    def process_weights_after_loading(self, layer: SimpleNamespace) -> None:
        layer.weights = [f"packed {weight}" for weight in layer.weights]


def test_experts_are_packed_once_at_each_load() -> None:
    for _ in range(2):
        pack_experts_at_each_load(ScriptedExperts)
    experts, layer = ScriptedExperts(), SimpleNamespace()
    for weights in (["w13", "w2"], ["new w13", "new w2"]):
        experts._setup_kernel(layer, *weights)
        assert layer.weights == [f"packed {weight}" for weight in weights]
