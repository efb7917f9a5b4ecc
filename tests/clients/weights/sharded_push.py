"""One process of a sharded model, started by a test: rank 0 writes the gathered weights, rank 1 takes part."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rollout_client.contract.policy import PolicyLayout, TensorLayout
from rollout_client.weights.sources import full_weights
from rollout_client.weights.torch_tensors import GatheredState, TorchSource, gather
from tests.model_families import random_model

EXPERTS = "model.layers.0.mlp.experts"


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    push(rank, tied_state(mesh), layout_of(embed=[5, 3], norm=[3]), folder / "whole.safetensors")
    layout = layout_of(
        **{f"{EXPERTS}.{expert}.{name}_proj.weight": [32, 64] for expert in range(4) for name in ("gate", "up")}
    )
    push(rank, fused_experts(mesh), layout, folder / "experts.safetensors")
    # A process that exits first closes the connection that the other still uses.
    dist.barrier()
    dist.destroy_process_group()


def layout_of(**shapes: list[int]) -> PolicyLayout:
    return PolicyLayout(tensors={name: TensorLayout(dtype="BF16", shape=shape) for name, shape in shapes.items()})


def tied_state(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    embed = distribute_tensor(torch.arange(15, dtype=torch.float32).reshape(5, 3), mesh, [Shard(0)])
    return {"embed": embed, "lm_head": embed, "norm": torch.ones(3)}


def fused_experts(mesh: DeviceMesh) -> GatheredState:
    """Sharded over the experts, where a checkpoint has a tensor for each."""
    model = random_model("qwen3-moe", 0)
    name = f"{EXPERTS}.gate_up_proj"
    return GatheredState(model, {name: distribute_tensor(model.get_parameter(name).detach(), mesh, [Shard(0)])})


def push(rank: int, source: TorchSource, layout: PolicyLayout, path: Path) -> None:
    if rank:
        gather(source, layout)
        return
    weights = full_weights(source, layout)
    assert not weights.is_repeatable
    with path.open("wb") as file:
        file.writelines(weights.blocks())


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
