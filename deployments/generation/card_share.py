"""Engines that share a card (`engine.engines_per_gpu`): how many of them, and how much of its memory each one has.

One engine of a small model leaves a card idle, because its Python process is slower than the card.
"""

import os
import re
import subprocess
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]  # Its HTTP library's.

from deployments.generation.settings import EngineSettings
from deployments.upstream.ray_serve.serve_internals import resources_of_this_machine

_GIB = 2**30
_MOST_ENGINES = 6
_CORES_OF_AN_ENGINE = 4
"""Its own process takes one, its replica another one, and ingress and environments what they make of its tokens."""
_WEIGHTS_IN_A_SHARE = 6
"""An engine has a share of at least so many times its weights: most of a card stays cache."""
_BESIDE_WEIGHTS_AND_CACHE = 4 * _GIB
"""CUDA's context, graphs, activations and logits of one engine with the batch sizes of a Hopper card."""
_CACHE_OF_THE_REST = 0.9
_LEAST_CACHE = _GIB
_DEFAULT_UTILIZATION = 0.9
_TIMEOUT_S = 10.0
"""For the Hub, and for `nvidia-smi`, which waits for a driver that hangs."""
_OWN_SIZES = ("kv_cache_memory_bytes", "num_gpu_blocks_override", "kv_offloading_size", "weight_transfer_config")
"""Fields that say what one engine takes, or that need a card for each."""
_INDEX = "config.json"
_WEIGHT_FILES = (".safetensors", ".bin")
"""In this order: a repository may have both."""
_SECOND_COPY = "consolidated"
"""How files begin in which a vendor's repository has its weights again."""


class CardTooSmall(ValueError):
    """Engines do not fit on a card, or it cannot be told whether they do."""


def with_share_of_card(engine: EngineSettings) -> EngineSettings:
    """The settings of one of the engines: `auto` is a number, and what it may take of its card's memory is set.

    The memory is that of the smallest card of this machine, as `nvidia-smi` tells it, and `gpu_memory_utilization` of
    the settings the part for all engines of a card. The cache of each has a size in bytes, because engines that start
    at once would count each other's memory as their own; without `max_model_len` a sequence is as long as it holds.

    Raises:
        CardTooSmall: the engines do not fit, or the card's memory or the size of the weights is not known.
    """
    engines = engines_on_a_card(engine)
    if engines == 1 or engine.replica is not None:
        return engine.model_copy(update={"engines_per_gpu": 1})
    utilization = _utilization(engine) / engines
    given = (engine.model_extra or {}).get("kv_cache_memory_bytes")
    return engine.model_copy(
        update={
            "engines_per_gpu": engines,
            "gpu_memory_utilization": utilization,
            "kv_cache_memory_bytes": given or _cache_bytes(engine, engines, utilization),
            "max_model_len": engine.max_model_len or "auto",
        }
    )


def engines_on_a_card(engine: EngineSettings) -> int:
    """`engines_per_gpu` as a number. For `auto`, 1 where the card or the size of the weights is not known."""
    if engine.engines_per_gpu != "auto":
        return engine.engines_per_gpu
    if engine.device == "cpu" or engine.workers > 1 or any(map((engine.model_extra or {}).get, _OWN_SIZES)):
        return 1
    cards = _memory_of_cards()
    if not cards or (weights := _weights_bytes(engine)) is None:
        return 1
    for_all = int(_utilization(engine) * min(cards))
    return _engines_for(weights, for_all, resources_of_this_machine()["CPU"] / len(cards))


def _engines_for(weights_bytes: int, memory_bytes: int, cores: float) -> int:
    """As many engines of one model as a card's memory for engines, and its cores, are worth: from 1 to 6."""
    share = _WEIGHTS_IN_A_SHARE * weights_bytes + 2 * _BESIDE_WEIGHTS_AND_CACHE
    return max(1, min(_MOST_ENGINES, memory_bytes // share, int(cores / _CORES_OF_AN_ENGINE)))


def _utilization(engine: EngineSettings) -> float:
    return (engine.model_extra or {}).get("gpu_memory_utilization") or _DEFAULT_UTILIZATION


def _cache_bytes(engine: EngineSettings, engines: int, utilization: float) -> int:
    cards, weights = _memory_of_cards(), _weights_bytes(engine)
    if not cards or weights is None:
        unknown = "no card that can be shared" if not cards else f"no size of the weights of {engine.model}"
        raise CardTooSmall(
            f"engines_per_gpu: {engines} engines share a card, and {unknown} is known here: give the cache of one "
            "engine as kv_cache_memory_bytes"
        )
    share = int(utilization * min(cards))
    cache = int(_CACHE_OF_THE_REST * (share - weights - _BESIDE_WEIGHTS_AND_CACHE))
    if cache < _LEAST_CACHE:
        raise CardTooSmall(
            f"engines_per_gpu: {engines} engines have {share / _GIB:.1f} GiB of a card each, of which weights take "
            f"{weights / _GIB:.1f} and activations and graphs 4: too little is left for a cache. Give fewer"
        )
    return cache


def _memory_of_cards() -> list[int]:
    """Bytes of each card of this machine; empty where `nvidia-smi` finds none, or one that takes a single process."""
    query = ["nvidia-smi", "--query-gpu=memory.total,compute_mode", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        query.append(f"--id={visible}")
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    cards = [re.fullmatch(r"(\d+), Default", line) for line in told.splitlines()]
    return [int(card[1]) * 2**20 for card in cards if card is not None] if all(cards) else []


def _weights_bytes(engine: EngineSettings) -> int | None:
    """The size of a model's files of weights; `None` if it has none, or cannot be reached."""
    sizes = _files_of(engine.model, engine.revision)
    of_weights = ([size for name, size in sizes.items() if name.endswith(ending)] for ending in _WEIGHT_FILES)
    return next((sum(found) for found in of_weights if found), None)


def _files_of(model: str, revision: str | None) -> dict[str, int]:
    """The sizes of a model's files, by their names: in its folder, else on the Hub, else in the Hub's cache.

    The cache comes last, because it may have a part of them.
    """
    folder, sizes = Path(model), dict[str, int]()
    if not folder.is_dir():
        try:
            told = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=_TIMEOUT_S).siblings
            sizes = {file.rfilename: file.size or 0 for file in told or ()}
        except HFValidationError:
            return {}
        except (HTTPError, OSError):
            cached = try_to_load_from_cache(model, _INDEX, revision=revision)
            folder = Path(cached).parent if isinstance(cached, str) else folder
    if folder.is_dir():
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    return {name: size for name, size in sizes.items() if "/" not in name and not name.startswith(_SECOND_COPY)}
