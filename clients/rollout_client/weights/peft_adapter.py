"""The LoRA adapter of a module that PEFT has wrapped, as PEFT itself saves it. Knows PEFT by the module's methods."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollout_client.weights.file_tensors import adapter_weights
from rollout_client.weights.safetensors_file import Data, TensorEntry
from rollout_client.weights.tensor import Weights

UNNAMED = "default"
"""What PEFT calls an adapter that was not given a name; it is saved in the folder itself."""


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
