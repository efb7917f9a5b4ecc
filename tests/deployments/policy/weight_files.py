"""Small files of weights, good ones and others, and what a refusal says of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deployments.policy.failures import PolicyFailure, WeightsRefused
from rollout_client.contract.policy import PolicyLayout, TensorLayout
from rollout_client.weights.delta import as_bits, delta_weights, encode_changes
from rollout_client.weights.safetensors_file import header_bytes, header_of, read_header, read_tensor

Tensors = dict[str, torch.Tensor]


GOOD: Tensors = {
    "embed.weight": torch.arange(12, dtype=torch.bfloat16).reshape(4, 3),
    "norm.weight": torch.ones(3, dtype=torch.bfloat16),
    "scale": torch.tensor(2.0),
}


LAYOUT = PolicyLayout(
    tensors={
        "embed.weight": TensorLayout(dtype="BF16", shape=[4, 3]),
        "norm.weight": TensorLayout(dtype="BF16", shape=[3]),
        "scale": TensorLayout(dtype="F32", shape=[]),
    }
)


def written(path: Path, tensors: Tensors) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


def raw(path: Path, dtype: str, value: bytes, name: str = "w", values: int = 3) -> Path:
    """A file with one tensor of zeros, but for its last value."""
    header = header_of([(name, dtype, (values,))])
    path.write_bytes(header_bytes(header.entries) + bytes(len(value) * (values - 1)) + value)
    return path


def findings(failure: PolicyFailure) -> list[tuple[str, str]]:
    return [(problem.field, problem.message) for problem in failure.problems]


def refusal(call: Callable[..., Any], *arguments: Any) -> list[tuple[str, str]]:
    with pytest.raises(WeightsRefused) as refused:
        call(*arguments)
    return findings(refused.value)


class Bomb:
    """Raises where a pickle of it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('the pickle was read')",))


def adapter(folder: Path, config: str = '{"r": 8}') -> Path:
    matrices = {
        "base_model.model.embed.lora_A.weight": torch.ones(8, 3),
        "base_model.model.embed.lora_B.weight": torch.zeros(4, 8),
    }
    written(folder / "adapter_model.safetensors", matrices)
    (folder / "adapter_config.json").write_text(config)
    return folder


def delta_of(base: Path, new: Path, delta: Path) -> Path:
    """Writes what changed from `base` to `new`."""
    base_header, new_header = read_header(base), read_header(new)
    changes = {
        entry.name: encode_changes(
            as_bits(entry.dtype, read_tensor(base, base_header, entry)),
            as_bits(entry.dtype, read_tensor(new, new_header, new_header.by_name[entry.name])),
        )
        for entry in base_header.entries
    }
    delta.write_bytes(b"".join(bytes(block) for block in delta_weights(changes, base_header).blocks()))
    return delta
