"""LoRA adapters as PEFT saves them: that of a module which PEFT has wrapped, and the rank that an adapter has.

Knows PEFT by the module's methods.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollout_client.contract.policy import PolicyLayout
from rollout_client.weights.file_tensors import adapter_weights
from rollout_client.weights.safetensors_file import Data, TensorEntry
from rollout_client.weights.tensor import Weights

UNNAMED = "default"
"""What PEFT calls an adapter that was not given a name; it is saved in the folder itself."""


class RankTooHigh(ValueError):
    """The service's engines do not take adapters of this rank; nothing was sent."""


def rank_problem(adapter_config: str, max_lora_rank: int | None) -> str | None:
    """Why engines do not take an adapter, if they take none of its rank.

    Args:
        adapter_config: the text of its `adapter_config.json`.
        max_lora_rank: as in `PolicyLayout`.
    """
    if max_lora_rank is None:
        return None
    if max_lora_rank == 0:
        return "the engines take no adapters: set enable_lora: true under engine in the service's config"
    config = json.loads(adapter_config)
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    rank = max((each for each in ranks if isinstance(each, int)), default=0)
    if rank <= max_lora_rank:
        return None
    return (
        f"its rank is {rank}, and the engines take at most {max_lora_rank}: raise max_lora_rank under engine in the "
        "service's config, or train with a smaller r"
    )


def with_accepted_rank(adapter: Weights, layout: PolicyLayout | None) -> Weights:
    """The same adapter; raises `RankTooHigh` if the engines of `layout` do not take it."""
    problem = None if layout is None else rank_problem(adapter.header.metadata["adapter_config"], layout.max_lora_rank)
    if problem is not None:
        raise RankTooHigh(f"The adapter does not fit the service; nothing was sent: {problem}.")
    return adapter


def module_adapter(module: Any) -> Weights:
    """The active adapter, in host memory: the module may change from now on.

    Raises:
        ValueError: PEFT has not wrapped the module, or several of its adapters are active.
    """
    if not hasattr(module, "peft_config"):
        raise ValueError(f"{type(module).__name__} has no adapter of PEFT, and kind='adapter' sends one.")
    active = [module.active_adapter] if isinstance(module.active_adapter, str) else list(module.active_adapter)
    if len(active) != 1:
        raise ValueError(f"The adapters {', '.join(active)} are active: set_adapter() chooses the one to be sent.")
    [name] = active
    with TemporaryDirectory() as folder:
        module.save_pretrained(folder, selected_adapters=[name])
        saved = adapter_weights(Path(folder) if name == UNNAMED else Path(folder, name))
        tensors = {entry.name: b"".join(saved.read(entry)) for entry in saved.header.entries}

    def read(entry: TensorEntry) -> Iterator[Data]:
        yield tensors[entry.name]

    return Weights(saved.header, read)
