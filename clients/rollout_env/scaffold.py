"""Writes a new environment, with its test, from the templates beside this file."""

import re
from pathlib import Path
from typing import NamedTuple

TEMPLATES = Path(__file__).parent / "templates"


class WrittenEnvironment(NamedTuple):
    """A new environment."""

    import_path: str
    files: list[Path]
    next_steps: str
    """Commands that test it, and its entry in the config."""


class NotWritten(Exception):
    """The new environment cannot be written. The message gives the reason."""


def write_environment(name: str, folder: Path) -> WrittenEnvironment:
    """Writes `NAME.py` and `test_NAME.py` into the folder, which is made if it is missing.

    Raises:
        NotWritten: the name is not that of a module, or one of the files exists.
    """
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module):
        raise NotWritten(f"{name!r} is not a name for a module: use small letters, digits and _, such as number_game.")
    task = "".join(part.capitalize() for part in module.split("_"))
    files = {folder / f"{module}.py": "environment.py.txt", folder / f"test_{module}.py": "test_environment.py.txt"}
    if there := [str(path) for path in files if path.exists()]:
        raise NotWritten(f"{' and '.join(there)} exists already: choose another name or folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for path, template in files.items():
        text = (TEMPLATES / template).read_text(encoding="utf-8")
        path.write_text(text.replace("TASK", task).replace("MODULE", module), encoding="utf-8")
    next_steps = (TEMPLATES / "next_steps.txt").read_text(encoding="utf-8")
    next_steps = next_steps.format(files=" and ".join(map(str, files)), folder=folder, module=module, task=task)
    return WrittenEnvironment(f"{module}:{task}Environment", list(files), next_steps)
