"""Writes that survive a crash of the machine: each function returns once the change is on disk."""

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Replaces the file at once: after a crash it holds either the old text or the new one, whole."""
    make_folder_durably(path.parent)
    beside = path.with_suffix(".new")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    flush(path.parent)


def make_folder_durably(folder: Path) -> None:
    """Makes the folder and its missing parents."""
    if not folder.is_dir():
        make_folder_durably(folder.parent)
        folder.mkdir(exist_ok=True)
        flush(folder.parent)


def flush(path: Path) -> None:
    """Waits until the content of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
