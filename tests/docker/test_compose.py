"""What the containers of the compose file may do."""

from typing import Any

import pytest
import yaml

from tests.paths import REPOSITORY

SERVICES: dict[str, Any] = yaml.safe_load((REPOSITORY / "docker" / "compose.yaml").read_text())["services"]
WRITTEN = {"prometheus": {"/tmp"}, "grafana": {"/tmp", "/var/lib/grafana"}}
OWN_VOLUMES = ("cache:", "prometheus:")
DOCKERFILE = (REPOSITORY / "docker" / "Dockerfile").read_text()


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
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert all(volume.endswith(":ro") for volume in service.get("volumes", ()) if not volume.startswith(OWN_VOLUMES))


def test_both_images_run_as_a_user_without_privileges_and_install_what_the_locks_hash() -> None:
    targets = DOCKERFILE.split("\nFROM base AS ")[1:]
    assert [target.split("\n")[0] for target in targets] == ["cpu", "gpu"]
    for target in targets:
        assert "\nUSER rollout\nCMD " in target
        assert "--no-deps --require-hashes -r" in target
