"""What the containers of the compose file may do."""

from typing import Any

import pytest
import yaml

from service.settings import ServiceSettings
from tests.paths import REPOSITORY

COMPOSE: dict[str, Any] = yaml.safe_load((REPOSITORY / "docker" / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
WRITTEN = {
    "gpu": {"/home/rollout"},
    "prometheus": {"/tmp"},
    "grafana": {"/tmp", "/var/lib/grafana"},
    "load": {"/tmp"},
    "load-worker": {"/tmp"},
}
OWN_VOLUMES = ("cache:", "cluster:", "prometheus:")


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


def test_the_config_of_the_cluster_is_that_of_the_processors() -> None:
    [cluster] = yaml.safe_load((REPOSITORY / "docker/cluster/serve_config.yaml").read_text())["applications"]
    [cpu] = yaml.safe_load((REPOSITORY / "serve_config.cpu.yaml").read_text())["applications"]
    settings = ServiceSettings.model_validate(cluster["args"])
    assert (settings.jobs, settings.policy.folder) == (None, "/var/lib/rollout/weights")
    assert "cluster:/var/lib/rollout" in SERVICES["ray-head"]["volumes"] == SERVICES["ray-worker"]["volumes"]
    differs = {"kv_cache_memory_bytes", "model"}
    assert {k: v for k, v in cluster["args"]["engine"].items() if k not in differs} == {
        k: v for k, v in cpu["args"]["engine"].items() if k not in differs
    }
    assert cluster["args"]["environments"] == cpu["args"]["environments"]
    assert [each["name"] for each in cluster["deployments"]] == [each["name"] for each in cpu["deployments"]]
