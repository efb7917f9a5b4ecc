"""Folders with adapters as PEFT saves them, from which vLLM loads them."""

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from deployments.policy.replicas.commands import VersionPayload

ADAPTER_FILE = "adapter_model.safetensors"


def adapter_folder(folder: Path, payload: VersionPayload, weights: Path, needed: Collection[str]) -> Path:
    """Makes `folder` with the adapter in it; removes those beside it that are not `needed` any more.

    The file of the node is linked into it: vLLM reads an adapter again that it has evicted. Where that is impossible,
    because the folders are on different file systems, it is copied.

    Args:
        needed: names of folders.
    """
    for other in folder.parent.iterdir():
        if other.name not in needed and other.is_dir():
            shutil.rmtree(other)
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(payload.adapter_config or "{}")
    linked = folder / ADAPTER_FILE
    if not linked.exists():
        try:
            os.link(weights, linked)
        except OSError:
            shutil.copyfile(weights, linked)
    return folder
