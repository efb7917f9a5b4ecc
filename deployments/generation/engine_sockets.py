"""Keeps the sockets of an engine's processes in a folder of their replica, and removes those of others that are gone.

vLLM gives each socket a file, about eight for an engine, and leaves them behind. The folder has the name of its
replica, as shared memory has (`deployments/shared_memory.py`), and each new replica removes those of replicas that are
gone.
"""

import os
import shutil
import tempfile
from pathlib import Path

from deployments.shared_memory import MARK, is_alive, owner_of, process_namespace

SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
"""Where vLLM makes them; by default in the folder for temporary files."""
LONGEST_ADDRESS = 107
"""Characters of a socket's path: what Linux takes."""
NAME_LENGTH = 36
"""Of a socket's file: vLLM names it by a UUID."""


def claim_socket_folder(parent: Path | None = None) -> None:
    """Makes the folder, for the processes that this replica will start.

    Does nothing where the variable is set already, or the paths would be too long.
    """
    parent = parent or Path(tempfile.gettempdir())
    remove_left_over(parent)
    folder = parent / f"{MARK}-{owner_of(os.getpid())}"
    if SOCKETS_VARIABLE in os.environ or len(str(folder / ("x" * NAME_LENGTH))) > LONGEST_ADDRESS:
        return
    folder.mkdir(mode=0o700, exist_ok=True)
    os.environ[SOCKETS_VARIABLE] = str(folder)


def remove_left_over(parent: Path) -> None:
    """Removes the folders of replicas on this machine that are gone; those that cannot be seen from here stay."""
    for folder in parent.glob(f"{MARK}-*"):
        owner = folder.name.removeprefix(f"{MARK}-")
        if owner.partition("-")[0] == process_namespace() and not is_alive(owner):
            # Another replica may remove the same at this moment.
            shutil.rmtree(folder, ignore_errors=True)
