"""Writes the locks with hashes: `make lock`. Each takes every file of a release in, so that it holds on any platform.

`cpu.lock` has the versions that the environment of this repository holds. `gpu.lock` is resolved from the three
`pyproject.toml`, and keeps its versions where they still fit. Both hold for each Python from 3.11 to 3.14. `tools.lock`
has the tools that make locks and look at them. The locks `BESIDE` keep their versions: another one is written into its
lock by hand, and gets its hashes here.
"""

import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from requirements.image_locks import PYTHON, write_image_locks

HERE = Path(__file__).parent
REPOSITORY = HERE.parent
GPU_PLATFORM = "x86_64-manylinux_2_28"
TOOLS = ("uv", "pip-audit", "cyclonedx-bom")
BESIDE = dict.fromkeys(
    ("agents", "bridges", "evals", "harness", "openenv", "tinker", "verifiers"), PYTHON
) | dict.fromkeys(("evaluators", "nemo_gym"), "3.13.0")
"""Packages that are no part of the service, with the version of Python that they run on."""
NOT_LOCKED = ("pip", "wheel")
ON_EACH_PYTHON = ("setuptools>=77,<81", "cuda-python>=13")
"""Versions that fit each Python; for the oldest alone others would do. The first one builds this repository."""
OF_CUDA_BUILDS = ("cuda-", "nvidia-", "triton==")
ELSEWHERE = ('pyyaml-ft==8.0.0; python_version == "3.13"',)
"""What packages of `cpu.lock` need on a Python that the environment of this repository does not have."""
OWN = ("rollout-client", "rollout-env")
TORCH_CPU = (
    "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
    "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
    "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
    "d20fa53ee744502fa4c69818a720b05ca0d37abd055d4f6e66cae155114bc691",
)
"""Sha-256 of torch 2.13.0+cpu for Python 3.11, 3.12, 3.13 and 3.14 on x86-64. PyTorch's own index has these builds, and
pip's does not."""


def main(uv: str) -> None:
    write(HERE / "tools.lock", TOOLS, uv, "--upgrade")
    write(HERE / "gpu.lock", gpu_requirements(), uv, f"--python-platform={GPU_PLATFORM}")
    write(HERE / "cpu.lock", [*held_here(), *ELSEWHERE], uv, "--no-deps", "--universal")
    add_hashes(HERE / "cpu.lock", "torch", TORCH_CPU)
    write_image_locks()
    for name, python in BESIDE.items():
        lock = HERE / f"{name}.lock"
        write(lock, pinned(lock), uv, "--no-deps", python=python)


def write(lock: Path, requirements: Iterable[str], uv: str, *options: str, python: str = PYTHON) -> None:
    command = [
        *(uv, "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"),
        *("--python-version", python, *options, "-", "--output-file", str(lock)),
    ]
    subprocess.run(command, input="\n".join(requirements), text=True, check=True, stdout=subprocess.DEVNULL)


def pinned(lock: Path) -> list[str]:
    """The versions in a lock."""
    lines = (line.split(";")[0].removesuffix("\\").strip() for line in lock.read_text().splitlines())
    return [line for line in lines if "==" in line]


def held_here() -> list[str]:
    """The versions that are installed, without the build of torch that this machine has and what a CUDA build needs."""
    excluded = [f"--exclude={name}" for name in NOT_LOCKED]
    frozen = subprocess.run(
        [sys.executable, "-m", "pip", "freeze", "--all", "--exclude-editable", *excluded],
        text=True,
        check=True,
        stdout=subprocess.PIPE,
    )
    lines = (line.removesuffix("+cpu") for line in frozen.stdout.splitlines())
    return [line for line in lines if not line.startswith(OF_CUDA_BUILDS)]


def gpu_requirements() -> list[str]:
    """What the service with a GPU needs that is not in this repository."""
    service, client, environment = (
        tomllib.loads((REPOSITORY / folder / "pyproject.toml").read_text())["project"]
        for folder in ("", "clients", "clients/rollout_env")
    )
    extras = client["optional-dependencies"]
    needed = [
        *service["dependencies"],
        *service["optional-dependencies"]["gpu"],
        *client["dependencies"],
        *(requirement for name in ("arrow", "cli", "weights") for requirement in extras[name]),
        *environment["dependencies"],
    ]
    return [requirement for requirement in needed if not requirement.startswith(OWN)] + [*ON_EACH_PYTHON]


def add_hashes(lock: Path, package: str, sha256: Iterable[str]) -> None:
    lines = lock.read_text().splitlines()
    [place] = [number for number, line in enumerate(lines) if line.startswith(f"{package}==")]
    lines[place + 1 : place + 1] = [f"    --hash=sha256:{each} \\" for each in sha256]
    lock.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
