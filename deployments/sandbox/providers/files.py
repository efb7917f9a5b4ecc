"""Files that come into sandboxes, as archives, and names of what folders hold, for images made once for each content.

A folder is read again when the path, the size, the rights or a time of one of its files has changed.
"""

import asyncio
import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from deployments.sandbox.providers.interface import SandboxFile, SandboxRefused

_MOST_FOLDERS = 4096


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


async def name_of(folder: Path) -> str:
    """A name that all folders with the same files have, and no others.

    Raises:
        SandboxRefused: a file cannot be read.
    """
    state = await asyncio.to_thread(_digest, folder, _state_of)
    return await asyncio.to_thread(_digest_of_content, folder, state)


@lru_cache(_MOST_FOLDERS)
def _digest_of_content(folder: Path, _state: str) -> str:
    return _digest(folder, _content_of)


def _digest(folder: Path, described: Callable[[Path], str]) -> str:
    """A hash of the paths in the folder with what `described` says of each file. Raises `SandboxRefused`."""
    digest, root = hashlib.sha256(), folder.resolve()
    try:
        for path in sorted(folder.rglob("*")):
            # What a link out of the folder leads to is in no image.
            link = str(path.readlink()) if path.is_symlink() else None
            is_file = path.is_file() and path.resolve().is_relative_to(root)
            entry = path.relative_to(folder).as_posix(), link, described(path) if is_file else None
            digest.update(f"{entry!r}\n".encode())
    except OSError as error:
        raise SandboxRefused(f"{folder} cannot be read: {error}.") from error
    return digest.hexdigest()


def _state_of(path: Path) -> str:
    found = path.stat()
    return f"{found.st_dev} {found.st_ino} {found.st_mode} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


def _content_of(path: Path) -> str:
    with path.open("rb") as file:
        return f"{os.access(path, os.X_OK)} {hashlib.file_digest(file, 'sha256').hexdigest()}"
