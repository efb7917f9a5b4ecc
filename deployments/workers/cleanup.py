"""Ends the processes of a replica with it, and frees the shared memory and sockets of replicas that were killed.

Shared memory, semaphores and sockets have names and outlive the processes that use them: the processes of an engine,
the worker processes of an environment. A killed one frees nothing, and multiprocessing's own tracker often dies with
its replica. So the names say which replica a piece belongs to. Each new replica removes those of replicas that are
gone, and so does a service that stops.
"""

import atexit
import ctypes
import os
import shutil
import signal
import tempfile
from multiprocessing import current_process, parent_process, shared_memory
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on Linux kills this process when its parent dies, also while it is stopped or computes.

    vLLM's own processes notice the death of the replica at their next message, if at all, and keep cores, memory and
    shared memory until then. Does nothing in a process that `multiprocessing` has not started.

    Linux takes the end of the thread that started this process for the death of the parent. A replica starts its engine
    in the thread of its event loop, and the engine its workers in its main thread: both live as long as their process.

    Raises:
        OSError: Linux refuses it.
    """
    parent = parent_process()
    if parent is None:
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if not parent.is_alive():
        # It died before Linux was asked.
        os.kill(os.getpid(), signal.SIGKILL)


FOLDER = Path("/dev/shm")
MARK = "rollout-replica"
OWNER_VARIABLE = "ROLLOUT_REPLICA_OWNER"
"""Names the replica in the processes below it."""
RANDOM_CHARACTERS = 16
LONGEST_ADDRESS = 107
"""Characters of a socket's path: what Linux takes."""
LONGEST_SOCKET = 36
"""Characters of a socket's name: vLLM's are UUIDs, those of multiprocessing are shorter."""


def claim_shared_memory(folder: Path = FOLDER) -> None:
    """Names what the processes of this replica will share by the replica, and frees what dead replicas left."""
    os.environ[OWNER_VARIABLE] = owner_of(os.getpid())
    name_by_owner()
    free_left_over(folder)


def name_by_owner() -> None:
    """Puts the replica into the names of the shared memory and semaphores that this process will make.

    Does nothing in a process that belongs to no replica.
    """
    owner = os.environ.get(OWNER_VARIABLE)
    if owner is None:
        return
    naming: Any = shared_memory
    naming._SHM_NAME_PREFIX = f"/{MARK}-{owner}-"
    naming._SHM_SAFE_NAME_LENGTH = len(naming._SHM_NAME_PREFIX) + RANDOM_CHARACTERS
    process: Any = current_process()
    process._config["semprefix"] = f"/{MARK}-{owner}"


def free_left_over(folder: Path = FOLDER) -> None:
    """Removes the shared memory of replicas on this machine that are gone.

    Those of other users, and of processes that cannot be seen from here (another container), stay.
    """
    for file in [*folder.glob(f"{MARK}-*"), *folder.glob(f"sem.{MARK}-*")]:
        owner = file.name.partition(f"{MARK}-")[2].rpartition("-")[0]
        if has_died(owner):
            # Another replica may free the same at this moment.
            file.unlink(missing_ok=True)


def claim_folder(parent: Path | None = None) -> Path | None:
    """Makes the folder of this replica for sockets, and removes those of replicas on this machine that are gone.

    multiprocessing's fork servers have their sockets there. `None` if a path in it would be too long for a socket.
    """
    parent = parent or Path(tempfile.gettempdir())
    remove_left_over(parent)
    folder = parent / f"{MARK}-{owner_of(os.getpid())}"
    if len(str(folder)) + 1 + LONGEST_SOCKET > LONGEST_ADDRESS:
        return None
    folder.mkdir(mode=0o700, exist_ok=True)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    process: Any = current_process()
    process._config["tempdir"] = str(folder)
    return folder


def remove_left_over(parent: Path | None = None) -> None:
    """Removes the folders of replicas on this machine that are gone; those that cannot be seen from here stay."""
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{MARK}-*"):
        if has_died(folder.name.removeprefix(f"{MARK}-")):
            # Another replica may remove the same at this moment.
            shutil.rmtree(folder, ignore_errors=True)


def owner_of(process_id: int) -> str:
    """A process of this machine for good: its namespace, its id, and when it began, because ids are used again.

    Raises:
        OSError: there is no such process.
    """
    return f"{_process_namespace()}-{process_id}-{_state_and_start_of(process_id)[1]}"


def has_died(owner: str) -> bool:
    """Whether a process has ended that can be seen from here: one of another namespace (a container) cannot."""
    namespace, _, process = owner.partition("-")
    if namespace != _process_namespace():
        return False
    process_id, _, began = process.partition("-")
    try:
        state, start = _state_and_start_of(int(process_id))
    except OSError:
        return True
    return start != began or state == "Z"


def _process_namespace() -> str:
    return str(Path("/proc/self/ns/pid").stat().st_ino)


def _state_and_start_of(process_id: int) -> tuple[str, str]:
    """The letter of its state, and when it began, in clock ticks since the machine started (`man proc_pid_stat`)."""
    values = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return values[0], values[19]
