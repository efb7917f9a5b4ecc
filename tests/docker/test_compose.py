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


def test_each_profile_starts_its_own_containers_and_without_one_nothing_starts() -> None:
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
def test_what_is_mounted_from_the_machine_is_read_only_and_published_on_loopback_alone(name: str) -> None:
    service = SERVICES[name]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    mounted = [volume for volume in service.get("volumes", ()) if ":" in volume and not volume.startswith(OWN_VOLUMES)]
    assert all(volume.endswith(":ro") for volume in mounted)


def test_one_container_at_a_time_has_the_name_that_the_others_ask() -> None:
    named = {name for name, service in SERVICES.items() if "rollout" in str(service.get("networks"))}
    assert named == SERVING
    assert "- LOCUST_HOST=${LOAD_HOST:-http://rollout:8000}" in (REPOSITORY / "docker" / "compose.yaml").read_text()


def test_a_further_run_can_have_ports_and_volumes_of_its_own() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert all(re.fullmatch(r"127\.0\.0\.1:\$\{[A-Z]+_PORT:-\d+\}:\d+", port) for port in ports)
    assert all(volume["name"].startswith("${ROLLOUT_VOLUMES:-rollout}-") for volume in COMPOSE["volumes"].values())


def test_images_run_as_a_user_without_privileges_and_install_what_the_locks_hash() -> None:
    assert list(TARGETS) == ["cpu", "gpu", "load"]
    for target in TARGETS.values():
        assert re.search(r"\nUSER rollout\n(EXPOSE \d+\n)?(CMD|ENTRYPOINT) ", target)
        assert "--no-deps --require-hashes -r /" in " ".join(target.replace("\\\n", " ").split())
        assert "--no-cache-dir" in target or "PIP_NO_CACHE_DIR=1" in DOCKERFILE


def test_a_layer_keeps_no_lists_of_packages_locks_or_sources() -> None:
    steps = re.findall(r"^RUN (?:[^\\\n]|\\\n)*", DOCKERFILE, re.MULTILINE)
    assert all("rm -rf /var/lib/apt/lists/*" in step for step in steps if "apt-get install" in step)
    assert all("--no-install-recommends" in step for step in steps if "apt-get install" in step)
    copied = re.findall(r"^COPY (.*)$", DOCKERFILE.partition("AS base")[2], re.MULTILINE)
    assert copied == [
        "--from=app --chmod=0755 / /app/",
        "--from=app --chmod=0755 / /app/",
        "--chmod=0755 clients/locustfile.py /app/",
    ]


def test_a_build_sees_what_its_targets_take_and_nothing_else() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    seen = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    sources = re.findall(r"(?:source=|^COPY (?:--\S+ )*)([\w./ -]+?)(?:,| /\S*$)", DOCKERFILE, re.MULTILINE)
    taken = {path for group in sources for path in group.split()} - {"/"}
    assert {"requirements/*.lock" if path.endswith(".lock") else path for path in taken} - {
        "clients/locustfile.py"
    } == seen


def test_the_config_of_the_cluster_is_that_of_the_processors_on_several_nodes() -> None:
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
