"""vLLM calls `install` in each of its processes before it configures the engine (entry point `vllm.general_plugins`).

It works around two faults of vLLM's build for processors.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path

import torch

OPENMP_LIBRARIES = ("libgomp", "libiomp", "libomp")


def install() -> None:
    """May be called more than once."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    allow_amx_tiles()
    for library in sorted(Path(torch.__file__).parent.glob("lib/libgomp.so*")):
        preload_by_name(library, os.environ)


def allow_amx_tiles() -> None:
    """Asks Linux for the tile registers of AMX.

    Linux kills a process with SIGILL that uses them without having asked; vLLM's bf16 attention kernel does not ask.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def preload_by_name(library: Path, environment: MutableMapping[str, str]) -> None:
    """Names torch's OpenMP library in LD_PRELOAD without its folder, if the folder's name contains a space.

    vLLM puts the whole path there, unless an OpenMP library is named there already. The dynamic linker splits it at the
    space: every process that is started afterwards writes errors to stderr, and the engine's threads share one core. A
    library without a folder is searched in LD_LIBRARY_PATH, which is not split at spaces.
    """
    preloaded = environment.get("LD_PRELOAD", "")
    has_space = any(map(str.isspace, str(library)))
    if not has_space or any(name in preloaded for name in OPENMP_LIBRARIES):
        return
    environment["LD_PRELOAD"] = ":".join(filter(None, (preloaded, library.name)))
    searched = environment.get("LD_LIBRARY_PATH")
    environment["LD_LIBRARY_PATH"] = ":".join(filter(None, (str(library.parent), searched)))
