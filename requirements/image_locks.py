"""The parts of `cpu.lock` that the container images install: `make lock` writes them after it.

Guarantee: each is a part of `cpu.lock`, and has all that the metadata of its packages asks for, of what `cpu.lock`
has. What that leaves out on purpose (torchvision and torchaudio, whose CUDA builds break transformers) is left out
here too.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
REPOSITORY = HERE.parent
OWN = ("rollout-client", "rollout-env")
PYTHON = "3.11.0"
"""The oldest Python that the locks are for. Some packages need others in its first releases."""
CLIENT_EXTRAS = ("arrow", "cli", "weights")
ENTRY = re.compile(r"\n(?=\S)")


def project(folder: str) -> dict[str, list[str]]:
    """The requirements of one `pyproject.toml` by extra; those without one are under `""`."""
    content = tomllib.loads((REPOSITORY / folder / "pyproject.toml").read_text())["project"]
    return {"": content["dependencies"], **content.get("optional-dependencies", {})}


def roots() -> dict[str, list[str]]:
    """What each image needs first hand, by the name of its lock."""
    service, client, environment = project(""), project("clients"), project("clients/rollout_env")
    given = [*service[""], *service["cpu"], *client[""], *environment[""]]
    served = [*given, *(requirement for extra in CLIENT_EXTRAS for requirement in client[extra])]
    return {"image-cpu": served, "image-load": [*client[""], *client["load"]]}


def entries(lock: str) -> dict[str, str]:
    """The entries of a lock by the canonical name of their package."""
    parts = ENTRY.split(lock.strip())
    return {canonicalize_name(re.split(r"==|\[", part, maxsplit=1)[0]): part for part in parts}


def closure(first: Iterable[str], locked: set[str]) -> set[str]:
    """The packages among `locked` that the requirements `first` need, by the metadata of what is installed."""
    found: set[tuple[str, str]] = set()
    left = [Requirement(requirement) for requirement in first]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        if name not in locked:
            continue
        new = {(name, extra) for extra in ("", *requirement.extras)} - found
        found |= new
        left.extend(needs for _, extra in new for needs in needed(name, extra))
    return {name for name, _ in found}


def needed(name: str, extra: str) -> Iterator[Requirement]:
    """What the package needs on this platform, without an extra or for one of them."""
    try:
        wanted = requires(name) or []
    except PackageNotFoundError:
        wanted = []
    for text in wanted:
        requirement = Requirement(text)
        marker = requirement.marker
        if not extra if marker is None else marker.evaluate({"extra": extra, "python_full_version": PYTHON}):
            yield requirement


def image_locks() -> dict[str, str]:
    """The content of each lock, by its name."""
    locked = entries((HERE / "cpu.lock").read_text())
    return {
        name: "\n".join(locked[package] for package in sorted(closure(first, set(locked)))) + "\n"
        for name, first in roots().items()
    }


def write_image_locks() -> None:
    for name, content in image_locks().items():
        (HERE / f"{name}.lock").write_text(content)
