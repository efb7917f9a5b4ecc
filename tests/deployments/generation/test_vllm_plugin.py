"""What the plugin does to the environment of vLLM's processes."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from vllm.lora.ops.torch_ops import lora_ops

from deployments.generation.vllm_plugin import (
    keep_adapters_from_tokens_without,
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
    def __init__(self) -> None:
        self.sampler_indices = torch.zeros(2)
        self.rows: list[int] = []

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, *_weights: object) -> None:
        self.rows.append(len(x))


def test_adapters_of_the_output_layer_are_added_to_generated_tokens_only() -> None:
    for _ in range(2):
        leave_out_head_adapters_of_prompts(ScriptedPunica)
    punica = ScriptedPunica()
    for rows in (2, 199):
        punica.add_lora_logits(torch.zeros(rows, 9), torch.zeros(rows, 4), None, None, 1.0)
    assert punica.rows == [2]


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
