"""Trainers whose rollout modules are tried as they are: the sources of one commit each, fetched, never committed.

`python -m tests.sockets.trainer_sources FOLDER NAME...` makes a folder for each name, of the packages that have its
rollout modules. Git names a commit by the hash of all that is in it, so that what is fetched is what was named.
"""

import argparse
import os
import subprocess
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

FROM = "TRAINERS_FROM"
"""A variable: the address, or a folder of clones, under which the repositories are."""
GITHUB = "https://github.com"


@dataclass(frozen=True, slots=True)
class TrainerSource:
    repository: str
    commit: str
    packages: tuple[str, ...]


SOURCES = {
    "slime": TrainerSource("THUDM/slime", "624b824a898ab0ec1fcb4d373004c7f3852bf515", ("slime",)),
    "miles": TrainerSource("radixark/miles", "31f1ca961a94cb860cec3b2dea34ec332bfa8f76", ("miles",)),
    "skyrl": TrainerSource("NovaSky-AI/SkyRL", "a9564572eb8e91076be43c1bd5e4615e3de17265", ("skyrl",)),
    "nemo_rl": TrainerSource("NVIDIA-NeMo/RL", "7ea279abfbeb698b092856d0dab61e7cf39bc909", ("nemo_rl",)),
    "prime_rl": TrainerSource(
        "PrimeIntellect-ai/prime-rl",
        "559b44772e471d1538537b8805cc77f3824a5e64",
        ("src", "packages/prime-rl-configs/src"),
    ),
}


class SourceFailed(Exception):
    """The sources of a trainer cannot be had. The message says why, and what to do."""


def fetch(name: str, folder: Path) -> None:
    """Makes `folder/name`. Raises `SourceFailed`."""
    source, base = SOURCES[name], os.environ.get(FROM) or GITHUB
    address = f"{base}/{source.repository}"
    with TemporaryDirectory() as made:
        git_folder = Path(address) if Path(address).is_dir() else Path(made)
        if git_folder == Path(made):
            git(name, git_folder, "init", "--quiet", "--bare")
            git(name, git_folder, "fetch", "--quiet", "--depth", "1", address, source.commit)
        archive = git(name, git_folder, "archive", source.commit, *source.packages)
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        # Python 3.11.2, which Debian 12 has, knows no argument `filter`.
        files.extraction_filter = getattr(tarfile, "data_filter", None)
        files.extractall(folder / name)


def git(name: str, folder: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise SourceFailed(
            f"The sources of {name} cannot be fetched: {said}. Its tests are left out. {FROM}=FOLDER names a folder "
            f"that has a clone in {SOURCES[name].repository}."
        )
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", choices=SOURCES)
    given = parser.parse_args()
    for name in given.names:
        try:
            fetch(name, given.folder)
        except SourceFailed as failed:
            parser.exit(1, f"{failed}\n")


if __name__ == "__main__":
    main()
