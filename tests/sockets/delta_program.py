"""Publishes disk deltas with miles' own writer: `python delta_program.py JOB`.

It runs with miles' sources on the path; `delta.py` and `disk_delta.py` are its own, unmodified. Stood in for: the
Megatron model, whose gathered tensors are read from files, the group of its processes, which is this one, and the calls
of its engines, of which there are none. `JOB` is JSON: the checkpoint that the training begins with, the weights of
each version in order, where to publish them, and how.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file

WRITER = "miles.backends.megatron_utils.update_weight.update_weight_from_distributed"


def stand_in(name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


class GatheredTensors:
    """The part of miles' updater that gathers the tensors of a Megatron model under their names in the checkpoint."""

    weights: Path

    def _init_lora(self, **_options: Any) -> None:
        """There is none."""

    def _gather_and_update_non_expert_weights(self, bucket_func: Callable[..., None], pbar: Any) -> None:
        bucket_func(list(load_file(self.weights).items()), pbar)

    def _gather_and_update_expert_weights(self, bucket_func: Callable[..., None], pbar: Any) -> None:
        bucket_func([], pbar)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo", init_method=f"file://{job['folder']}.rendezvous", rank=0, world_size=1)
    only = Namespace(rank=0)
    state = Namespace(intra_dp_cp=only, tp=only)
    stand_in("miles.backends.training_utils.parallel", get_parallel_state=lambda: state)
    stand_in("miles.utils.distributed_utils", get_gloo_group=lambda: dist.group.WORLD)
    stand_in(
        WRITER.replace("update_weight_from_distributed", "common"), _check_weight_sync_results=lambda *_, **__: None
    )
    stand_in(f"{WRITER}.mixin", DistBucketedWeightUpdateMixin=GatheredTensors)
    from importlib import import_module

    args = Namespace(
        update_weight_disk_dir=job["folder"],
        update_weight_delta_encoding=job["encoding"],
        update_weight_delta_checksum=job["checksum"],
        custom_update_weight_post_write_path=None,
        hf_checkpoint=job["checkpoint"],
        check_weight_update_equal=False,
    )
    updater = import_module(f"{WRITER}.delta").UpdateWeightFromDiskDelta(
        args, [], dict, model_name="llama", quantization_config=None
    )
    updater.connect_rollout_engines([], None)
    updater.weights = Path(job["checkpoint"], "model.safetensors")
    # As `update_weights`, without its metrics, which it counts on a GPU, and its engines.
    updater._capture_baseline()  # noqa: SLF001 - what slime's own updater calls
    for weights in job["versions"]:
        updater.weights = Path(weights)
        updater.weight_version += 1
        updater._publish()  # noqa: SLF001 - what slime's own updater calls
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
