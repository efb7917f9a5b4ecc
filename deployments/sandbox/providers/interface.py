"""One interface for sandboxes in which commands run one after another: open, exec, files, close.

`Sandbox` (`deployments/sandbox/interface.py`) runs one program and is gone. A `RunningSandbox` keeps its files and
processes from one command to the next, until it is destroyed. A `SandboxProvider` makes them.

Guarantees of every provider: a sandbox has the label of its owner, the process that created it, from its first moment
on; `close` returns when nothing of it is left; a dead owner leaves nothing, except with `harbor`, and with `docker` and
`kubernetes` where their reaper (`ReapedProvider`) dies with it.
"""

import hashlib
import importlib
import inspect
import io
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from deployments.sandbox.interface import MIB

OWNER_LABEL = "rollout-owner"
"""The label whose value names the process that created a sandbox."""
LARGEST_OUTPUT_BYTES = MIB
LARGEST_FILE_BYTES = 64 * MIB
KILLED = 128 + 9
"""Exit code of a command that SIGKILL ended."""
MOST_SNAPSHOTS = 256
DEFAULT_MEMORY_MB, MOST_PROCESSES = 2048, 512
"""Bounds of a sandbox beside the service: memory where its task names none, and processes, threads included."""


class SandboxRefused(ValueError):
    """A sandbox cannot be made as it is asked for, however often one tries. The message says what, and what to do."""


class ProviderUnusable(Exception):
    """The provider cannot make sandboxes on this machine or with these settings. The message is a sentence."""


class OutOfMemory(Exception):
    """The processes of a sandbox used more than its memory, and it was destroyed."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """The sandbox that is asked for. Exactly one of `image`, `folder` and `snapshot` is given."""

    image: str | None = None
    """Name of an image."""
    folder: Path | None = None
    """Folder with a `Dockerfile`, which is also the context of its build."""
    snapshot: str | None = None
    """The name that `RunningSandbox.snapshot` has returned, of a sandbox of the same provider."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of all commands, beside those of the image."""
    workdir: str | None = None
    """Absolute path in which commands run, in place of that of the image."""
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    network: bool = False
    """Whether it reaches more than the service. Without one only a sandbox of `local` reaches that, by `reach`."""
    read_only_folders: tuple[str, ...] = ()
    """Absolute paths of this machine, which commands see at the same place, to read."""
    build_timeout_s: float = 600.0
    lifetime_s: float = 3600.0
    """Seconds after which a provider that is far away destroys it by itself."""

    def __post_init__(self) -> None:
        """Raises `SandboxRefused`."""
        if [self.image, self.folder, self.snapshot].count(None) != 2:
            raise SandboxRefused("A sandbox is made from an image, a folder with a Dockerfile or a snapshot: give one.")
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise SandboxRefused(f"workdir must be an absolute path, got {self.workdir!r}.")

    def refuse_limits(self, reason: str, *names: str) -> None:
        """Raises `SandboxRefused` for the first of the limits that is given; `reason` says why none bounds anything."""
        for name in names:
            if (given := getattr(self, name)) is not None:
                raise SandboxRefused(
                    f"{name} is {given:g}, and {reason}: leave {name} out, or use a provider that bounds it."
                )

    def refuse_folders(self, provider: str) -> None:
        """Raises `SandboxRefused` for folders of this machine."""
        if self.read_only_folders:
            raise SandboxRefused(
                f"The provider {provider} is not on this machine, and shows none of its folders: have the image hold "
                f"what is in {', '.join(self.read_only_folders)}."
            )


@dataclass(frozen=True, slots=True)
class ExecResult:
    exit_code: int
    """128 + n if signal n ended the command."""
    stdout: str
    """The last `LARGEST_OUTPUT_BYTES`, decoded as UTF-8 with replacement characters."""
    stderr: str


class RunningSandbox(Protocol):
    """One sandbox. Commands may overlap.

    All methods but `close` raise `SandboxLost` when the sandbox is gone, or nothing is known about the call, and
    `OutOfMemory` when it was destroyed for its memory.
    """

    @property
    def id(self) -> str:
        """The name by which the provider knows it."""
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
    ) -> ExecResult:
        """Runs a command to its end. Cancelling the call ends the command and its process group.

        Args:
            argv: no shell reads it.
            cwd: by default the working directory of the sandbox.
            timeout_s: None for no limit.

        Raises:
            TimeoutError: the command was ended after `timeout_s`. The sandbox goes on.
        """
        ...

    async def write_files(self, files: Mapping[str, "SandboxFile"]) -> None:
        """Writes files by absolute path, and makes the folders that are missing."""
        ...

    async def read_file(self, path: str) -> bytes | None:
        """The content of the file at the absolute path, at most `LARGEST_FILE_BYTES`; None if there is no such file.

        Of a larger one not much more than that is read.

        Raises:
            SandboxRefused: it is larger, or not a file.
        """
        ...

    async def snapshot(self) -> str:
        """Keeps a copy of its files as they are now, and returns its name, for `SandboxSpec.snapshot`.

        Its processes are not copied. The copy stays when the sandbox is closed, until the provider has made
        `MOST_SNAPSHOTS` further ones or is closed.

        Raises:
            SandboxRefused: the provider keeps no snapshots.
        """
        ...

    async def reach(self, base_url: str) -> str:
        """The address at which commands in the sandbox reach the service at `base_url`, for the rest of its life.

        Raises:
            SandboxRefused: the sandbox has no network, and reaches the service by nothing else.
        """
        ...

    async def close(self) -> None:
        """Ends all processes and removes all files, to the end also if the caller is cancelled.

        Returns also if it is gone already; never raises `SandboxLost`.
        """
        ...


class SandboxProvider(Protocol):
    """Makes sandboxes."""

    @property
    def name(self) -> str: ...

    @property
    def has_network(self) -> bool:
        """Whether its sandboxes can reach more than the service."""
        ...

    async def open(self, spec: SandboxSpec) -> RunningSandbox:
        """Returns when commands can run. Cancelling the call leaves nothing behind.

        Raises:
            SandboxRefused: it cannot be made, or a limit of it cannot be enforced.
            SandboxLost: it was not made now; another try may succeed.
        """
        ...

    def close(self) -> None:
        """Destroys all sandboxes of this owner."""
        ...


ProviderName = Literal["local", "docker", "kubernetes", "harbor"]
"""Each is the name of a module beside this one, which has a class `<Name>Provider`."""


def open_provider(name: str, options: Mapping[str, Any]) -> SandboxProvider:
    """The provider of a `ProviderName`, whose module is imported now. Raises `ProviderUnusable`."""
    try:
        module = importlib.import_module(f"{__package__}.{name}")
    except ModuleNotFoundError as error:
        raise ProviderUnusable(
            f"the provider {name} needs the package {error.name}, which is not installed."
        ) from error
    make: Callable[..., SandboxProvider] = getattr(module, f"{name.capitalize()}Provider")
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        known = ", ".join(inspect.signature(make).parameters) or "none"
        raise ProviderUnusable(f"options: {error}; the provider {name} takes {known}.") from error
    return make(**options)


@dataclass(frozen=True, slots=True)
class SandboxFile:
    content: bytes
    executable: bool = False

    @classmethod
    def at(cls, path: Path) -> Self:
        return cls(path.read_bytes(), os.access(path, os.X_OK))


def files_below(folder: Path, target: str) -> dict[str, SandboxFile]:
    """The files of a folder of this machine, by their absolute path below `target`.

    Links inside the folder are followed; one that leads out of it raises `SandboxRefused`.
    """
    files, root = {}, folder.resolve()
    for path in sorted(folder.rglob("*")):
        if not path.resolve().is_relative_to(root):
            raise SandboxRefused(f"{path} is a link out of {folder}: replace it by the file itself.")
        if path.is_file():
            files[f"{target.rstrip('/')}/{path.relative_to(folder).as_posix()}"] = SandboxFile.at(path)
    return files


def tar_of(files: Mapping[str, SandboxFile]) -> bytes:
    """The files as a tar archive, with paths relative to the root, owned by root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, file in files.items():
            member = tarfile.TarInfo(path.lstrip("/"))
            member.size, member.mode = len(file.content), 0o755 if file.executable else 0o644
            archive.addfile(member, io.BytesIO(file.content))
    return buffer.getvalue()


def state_of(folder: Path) -> str:
    """A hash that is another one when a path, the size, the rights or a time of a file in the folder has changed.

    Raises:
        SandboxRefused: the folder cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted(folder.rglob("*")):
            found = path.lstat()
            entry = path.relative_to(folder), found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns
            digest.update(f"{entry}{found.st_ctime_ns}\n".encode())
    except OSError as error:
        raise SandboxRefused(f"{folder} cannot be read: {error}.") from error
    return digest.hexdigest()
