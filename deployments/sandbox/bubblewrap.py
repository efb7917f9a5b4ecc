"""The command line of bubblewrap, for the walls of a run and for those of a sandbox that lives on.

bubblewrap makes new namespaces for everything, and a file system that holds almost nothing. Where the service runs as
root, the processes get a user id of their own; else a new user namespace maps the service's own one. Either lets the
kernel count the processes of one launch alone: it does not for root.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path, PurePosixPath

from deployments.sandbox.interface import MIB, Limits, Program, WallName
from deployments.sandbox.launch import NICENESS, Interpreter, Launch, held_file
from deployments.sandbox.system_calls import system_call_filter

SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_WORK = "/tmp/work"
_FILTER = system_call_filter()
_NAMESPACES = [
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"),
]


def bubblewrap_launch(
    status_fd: int,
    closing: ExitStack,
    *,
    users: Sequence[str],
    mounts: Sequence[str],
    folders: Sequence[str],
    files: Mapping[str, bytes],
    file_mode: str,
    variables: Mapping[str, str],
    inside: Sequence[str],
    outside: Sequence[str] = (),
    shared_memory_bytes: int = MIB,
    at_last: Sequence[str] = (),
) -> Launch:
    """A launch that has ended when `closing` is closed, with these walls besides those that all have.

    Args:
        users: options about user ids and capabilities.
        mounts: options that make the file systems to write.
        folders: outside of the system's, to read.
        files: by absolute path.
        inside: the command behind the walls.
        outside: the beginning of the command that starts bubblewrap.
        shared_memory_bytes: size of `/dev/shm`, where the locks of `multiprocessing` are.
        at_last: options after all mounts and files.
    """
    held: list[int] = []

    def holding(content: bytes) -> str:
        held.append(held_file(closing, content))
        return str(held[-1])

    command = ["nice", "-n", str(NICENESS), *outside, "bwrap", "--json-status-fd", str(status_fd)]
    command += [*_NAMESPACES, *users]
    if _FILTER is not None:
        command += ["--seccomp", holding(_FILTER)]
    command += [*mounts, "--proc", "/proc", "--dev", "/dev"]
    command += ["--perms", "1777", "--size", str(shared_memory_bytes), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    command += [*_system_mounts(), *_folder_mounts(folders)]
    for path, content in files.items():
        command += ["--perms", file_mode, "--file", holding(content), path]
    command += at_last
    for name, value in variables.items():
        command += ["--setenv", name, value]
    return Launch([*command, *inside], tuple(held))


def _system_mounts() -> list[str]:
    """The system's programs and libraries, to read."""
    mounts = []
    for folder in SYSTEM_FOLDERS:
        path = Path(folder)
        if path.is_symlink():
            mounts += ["--symlink", str(path.readlink()), folder]
        elif path.exists():
            mounts += ["--ro-bind", folder, folder]
    return mounts


def _folder_mounts(folders: Sequence[str]) -> list[str]:
    # bubblewrap would make parents that only root may enter.
    parents = sorted({str(parent) for folder in folders for parent in Path(folder).parents} - {"/"})
    mounts = [part for parent in parents for part in ("--perms", "0755", "--dir", parent)]
    return mounts + [part for folder in folders for part in ("--ro-bind", folder, folder)]


class Bubblewrap:
    """The walls of runs."""

    name = "bubblewrap"
    without: frozenset[WallName] = frozenset({"system_calls"} if _FILTER is None else ())
    """Walls that nothing enforces under this isolation on this machine."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter

    @asynccontextmanager
    async def launch(
        self, program: Program, files: Mapping[str, bytes], limits: Limits, uid: int | None, status_fd: int
    ) -> AsyncIterator[Launch]:
        """Prepares one run; leaving the context removes what was prepared.

        Args:
            files: as `Program.checked_files` returns them.
            uid: the run gets this user id, which no other process has; None keeps that of the service.
            status_fd: see `Launch`.
        """
        if uid is None:
            users, owner = ["--unshare-user", "--cap-drop", "ALL"], []
        else:
            users = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
            owner = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        # In a user namespace the first process of the process namespace counts as one of the run's.
        values = limits.of_kernel(limits.processes + (uid is None)).items()
        mounts = ["--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", "/tmp"]
        folders = {str(parent) for name in files for parent in PurePosixPath(name).parents}
        for folder in sorted(folders):
            mounts += ["--perms", "0777", "--dir", str(PurePosixPath(_WORK, folder))]
        with ExitStack() as closing:
            yield bubblewrap_launch(
                status_fd,
                closing,
                users=users,
                mounts=mounts,
                folders=self._interpreter.folders,
                files={f"{_WORK}/{name}": content for name, content in files.items()},
                file_mode="0666",
                at_last=["--remount-ro", "/", "--chdir", _WORK],
                variables=self._interpreter.variables(_WORK),
                inside=[
                    *(*owner, "prlimit", *(f"--{name}={soft}:{hard}" for name, (soft, hard) in values)),
                    *self._interpreter.command(program),
                ],
            )
