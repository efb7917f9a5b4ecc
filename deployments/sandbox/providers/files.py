"""Files that come into sandboxes, as archives, and states of folders, for images made once for each state."""

import hashlib
import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path

from deployments.sandbox.providers.interface import SandboxFile, SandboxRefused


def files_below(folder: Path, target: str) -> dict[str, SandboxFile]:
    """The files of a folder of this machine, by their absolute path below `target`.

    Links inside the folder are followed; one that leads out of it raises `SandboxRefused`.
    """
    files, root = {}, folder.resolve()
    for path in sorted(folder.rglob("*")):
        if not path.resolve().is_relative_to(root):
            raise SandboxRefused(f"{path} is a link out of {folder}: replace it by the file itself.")
        if path.is_file():
            files[f"{target.rstrip('/')}/{path.relative_to(folder).as_posix()}"] = file_at(path)
    return files


def file_at(path: Path) -> SandboxFile:
    return SandboxFile(path.read_bytes(), os.access(path, os.X_OK))


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
