"""One process of a sharded model, started by a test: rank 0 writes the gathered weights, rank 1 takes part."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rollout_client.policy_contract import PolicyLayout, TensorLayout
from rollout_client.weights.sources import full_weights
from rollout_client.weights.torch_tensors import gather


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    embed = distribute_tensor(torch.arange(15, dtype=torch.float32).reshape(5, 3), mesh, [Shard(0)])
    state = {"embed": embed, "lm_head": embed, "norm": torch.ones(3)}
    tensors = {
        "embed": TensorLayout(dtype="BF16", shape=[5, 3]),
        "norm": TensorLayout(dtype="BF16", shape=[3]),
    }
    layout = PolicyLayout(tensors=tensors)
    if rank:
        gather(state, layout)
    else:
        weights = full_weights(state, layout)
        assert not weights.is_repeatable
        with (folder / "whole.safetensors").open("wb") as file:
            file.writelines(weights.blocks())
    # A process that exits first closes the connection that the other still uses.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
