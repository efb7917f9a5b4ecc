"""What the containers of the compose file may do, and which of them each profile starts."""

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from service.settings import ServiceSettings
from tests.paths import REPOSITORY

COMPOSE: dict[str, Any] = yaml.safe_load((REPOSITORY / "docker" / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
SERVING = {"cpu", "gpu", "ray-head"}
PROFILES = {
    "cpu": {"cpu"},
    "gpu": {"gpu"},
    "cluster": {"ray-head", "ray-worker"},
    "observability": {"prometheus", "grafana"},
    "load": {"load", "load-worker"},
}
WRITTEN = {
    "gpu": {"/home/rollout"},
    "prometheus": {"/tmp"},
    "grafana": {"/tmp", "/var/lib/grafana"},
    "load": {"/tmp"},
    "load-worker": {"/tmp"},
}
OWN_VOLUMES = ("cache:", "cluster:", "prometheus:")
DOCKERFILE = (REPOSITORY / "docker" / "Dockerfile").read_text()
TARGETS = {part.split("\n")[0]: part for part in DOCKERFILE.split("\nFROM base AS ")[1:]}


def test_each_profile_starts_its_own_containers() -> None:
    started = {name: {each for each, service in SERVICES.items() if name in service["profiles"]} for name in PROFILES}
    assert started == PROFILES
    assert all(len(service["profiles"]) == 1 for service in SERVICES.values())


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_no_privileges_a_read_only_root_and_limits(name: str) -> None:
    service = SERVICES[name]
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert service["read_only"] is True
    written = {mount.partition(":")[0] for mount in service["tmpfs"]}
    assert written == WRITTEN.get(name, {"/tmp", "/home/rollout"})
    assert service["pids_limit"] > 0
    assert service["mem_limit"]
    assert not {"cap_add", "privileged", "user", "network_mode", "pid", "ipc"} & service.keys()


@pytest.mark.parametrize("name", SERVICES)
def test_mounts_are_read_only_and_ports_are_on_loopback(name: str) -> None:
    service = SERVICES[name]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    mounted = [volume for volume in service.get("volumes", ()) if ":" in volume and not volume.startswith(OWN_VOLUMES)]
    assert all(volume.endswith(":ro") for volume in mounted)


def test_images_run_unprivileged_and_install_hashed_packages() -> None:
    assert list(TARGETS) == ["cpu", "gpu", "load"]
    for target in TARGETS.values():
        assert re.search(r"\nUSER rollout\n(EXPOSE \d+\n)?(CMD|ENTRYPOINT) ", target)
        assert "--no-deps --require-hashes -r /" in " ".join(target.replace("\\\n", " ").split())
        assert "--no-cache-dir" in target or "PIP_NO_CACHE_DIR=1" in DOCKERFILE


def test_the_config_of_the_cluster_is_that_of_the_processors() -> None:
    [cluster] = yaml.safe_load((REPOSITORY / "docker/cluster/serve_config.yaml").read_text())["applications"]
    [cpu] = yaml.safe_load((REPOSITORY / "serve_config.cpu.yaml").read_text())["applications"]
    settings = ServiceSettings.model_validate(cluster["args"])
    assert (settings.jobs, settings.policy.folder) == (None, "/var/lib/rollout/weights")
    assert "cluster:/var/lib/rollout" in SERVICES["ray-head"]["volumes"] == SERVICES["ray-worker"]["volumes"]
    differs = {"environment_variables", "model"}
    assert {k: v for k, v in cluster["args"]["engine"].items() if k not in differs} == {
        k: v for k, v in cpu["args"]["engine"].items() if k not in differs
    }
    assert cluster["args"]["environments"] == cpu["args"]["environments"]
    assert [each["name"] for each in cluster["deployments"]] == [each["name"] for each in cpu["deployments"]]


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_compose_reads_the_file_with_each_profile(profile: str) -> None:
    command = ["docker-compose", "--file", str(REPOSITORY / "docker" / "compose.yaml"), "--profile", profile, "config"]
    read = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert json.loads(json.dumps(yaml.safe_load(read)))["services"].keys() == SERVICES.keys()
