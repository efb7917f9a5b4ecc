"""Limits of a sandbox: what a provider is asked for, or the sentence with which it refuses before anything is made.

Those of `local` are held by `test_local_walls.py`.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from deployments.sandbox.providers.interface import (
    RunningSandbox,
    SandboxProvider,
    SandboxRefused,
    SandboxSpec,
    open_provider,
)
from tests.deployments.sandbox.providers.stand_ins.docker_engine import Engine, engine
from tests.deployments.sandbox.providers.stand_ins.kubectl import cluster
from tests.deployments.sandbox.providers.stand_ins.world import ASKED, KNOWN_IMAGE, WORLDS, World
from tests.virtual_time import runs

pytestmark = pytest.mark.slow

LIMITS: dict[str, dict[str, Any]] = {
    "no-network": {"network": False},
    "cpus": {"cpus": 1.5},
    "memory_mb": {"memory_mb": 3000},
    "storage_mb": {"storage_mb": 100},
    "processes": {},
}
MIB = 2**20
ENFORCED: dict[tuple[str, str], dict[str, Any]] = {
    ("docker", "no-network"): {"NetworkMode": "none"},
    ("docker", "cpus"): {"NanoCpus": 1_500_000_000, "NetworkMode": "host"},
    ("docker", "memory_mb"): {"Memory": 3000 * MIB, "MemorySwap": 3000 * MIB},
    ("docker", "processes"): {"PidsLimit": 512, "Memory": 2048 * MIB, "MemorySwap": 2048 * MIB},
    ("kubernetes", "cpus"): {"limits": {"cpu": "1.5", "memory": "2048Mi"}, "requests": {"cpu": "1.5"}},
    ("kubernetes", "memory_mb"): {"limits": {"memory": "3000Mi"}, "requests": {"memory": "3000Mi"}},
    ("kubernetes", "storage_mb"): {
        "limits": {"ephemeral-storage": "100Mi", "memory": "2048Mi"},
        "requests": {"ephemeral-storage": "100Mi"},
    },
}
"""By provider and limit, what the provider was asked for."""
REFUSED = {
    ("docker", "storage_mb"): "^storage_mb is 100, and a Docker engine bounds no files .*: leave storage_mb out",
    ("kubernetes", "no-network"): "^network_mode is no-network, and the provider kubernetes .*: use another provider",
}


class Nowhere(World):
    """Makes sandboxes that are names alone."""

    def __init__(self, folder: Path) -> None:
        self.held: dict[str, RunningSandbox] = {}
        self.folder = folder

    async def create(self, _image: str | Path, _environment: dict[str, str]) -> str:
        name = uuid4().hex
        self.held[name] = None  # type: ignore[assignment]
        return name

    async def destroy(self, sandbox_id: str) -> None:
        del self.held[sandbox_id]


@asynccontextmanager
async def provided(
    name: str, folder: Path, docker: Engine | None = None, template: str | None = None
) -> AsyncIterator[SandboxProvider]:
    """The provider before a stand-in that makes nothing. `ASKED` has what it is asked for within the block."""
    async with AsyncExitStack() as closing:
        WORLDS.append(Nowhere(folder))
        closing.callback(WORLDS.pop)
        closing.callback(ASKED.clear)
        if name == "docker":
            options: dict[str, Any] = {"socket": str(folder / "docker.sock")}
            await closing.enter_async_context(engine(folder / "docker.sock", docker))
        else:
            options = {"kubectl": str(await closing.enter_async_context(cluster(folder))), "template": template}
        provider = open_provider(name, options)
        provider.start_reaper = lambda: None  # type: ignore[attr-defined]
        closing.callback(provider.close)
        yield provider


@runs
async def asked_of(name: str, folder: Path, limits: dict[str, Any], **further: Any) -> dict[str, Any]:
    """All that the provider was asked for one sandbox with the limits."""
    async with provided(name, folder, **further) as provider:
        await provider.open(SandboxSpec(image=KNOWN_IMAGE, **{"network": True} | limits))
        return {key: value for asked in ASKED for key, value in asked.items()}


@pytest.mark.parametrize(("name", "limit"), ENFORCED)
def test_a_limit_is_asked_of_the_provider(name: str, limit: str, tmp_path: Path) -> None:
    expected = ENFORCED[name, limit]
    asked = asked_of(name, tmp_path, LIMITS[limit])
    assert {key: asked[key] for key in expected} == expected


@pytest.mark.parametrize(("name", "limit"), REFUSED)
def test_a_limit_that_a_provider_cannot_enforce_is_refused(name: str, limit: str, tmp_path: Path) -> None:
    with pytest.raises(SandboxRefused, match=REFUSED[name, limit]):
        asked_of(name, tmp_path, LIMITS[limit])
    assert ASKED == []


def test_what_a_docker_engine_would_leave_out_is_refused(tmp_path: Path) -> None:
    said = "Your kernel does not support memory limit capabilities. Limitation discarded."
    with pytest.raises(SandboxRefused, match=f"bounds no container: {said}"):
        asked_of("docker", tmp_path, {}, docker=Engine(warnings=[said]))
    assert ASKED == []


@runs
async def test_a_sandbox_without_a_network_reaches_no_service_by_it(tmp_path: Path) -> None:
    async with provided("docker", tmp_path) as provider:
        sandbox = await provider.open(SandboxSpec(image=KNOWN_IMAGE, network=False))
        with pytest.raises(SandboxRefused, match=r"^network_mode is no-network, .* reaches http://service by its net"):
            await sandbox.reach("http://service")


def test_resources_of_a_template_stand_where_a_task_names_none(tmp_path: Path) -> None:
    template = tmp_path / "pod.yaml"
    resources = "{limits: {memory: 4Gi, gpu: 1}, requests: {cpu: 2, memory: 1Gi}}"
    template.write_text(f"spec: {{containers: [{{resources: {resources}}}]}}")
    asked = asked_of("kubernetes", tmp_path, {"cpus": 1}, template=str(template))
    assert asked["limits"] == {"memory": "4Gi", "gpu": 1, "cpu": "1"}
    assert asked["requests"] == {"cpu": "1", "memory": "1Gi"}
