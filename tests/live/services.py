"""The services that several files share, and the one that runs: a process has one Ray."""

import os
import ssl
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import yaml
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema, ServeDeploySchema
from rich.console import Console

from rollout_client import RolloutClient
from service.access.keys import new_key
from service.access.new_key import _add, _entry_of
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service
from tests.live.abandoned_rollouts import TASK_NAME as ENDLESS
from tests.live.certificate import Certificate
from tests.paths import REPOSITORY

REPLICAS = 2
"""Of the simulated service's ingress, and of its environments but the endless one."""
LEASE_S = 5.0
IMAGES_BYTES = 16 * 2**20
CONFIG = REPOSITORY / "serve_config.cpu.yaml"
SIMULATED = REPOSITORY / "serve_config.scale.yaml"


def of_tests(config: ServeDeploySchema) -> ServeDeploySchema:
    """The config, whose replicas wait 4 s at the most for what the tests have left under way, and look often.

    A replica that is shut down hands its generations or steps over after half of this time. An engine has 256 MiB for
    its KV cache, whose pages it touches at its start: on a fresh virtual machine that takes some 15 s for a GiB.
    """
    [application] = config.applications
    application.args["engine"]["kv_cache_memory_bytes"] = 2**28
    for deployment in application.deployments:
        deployment.graceful_shutdown_timeout_s = 4
        deployment.graceful_shutdown_wait_loop_s = 0.5
    return config


class RunningService:
    """One service at a time."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._url = ""
        self._to_stop = ExitStack()

    def url(self, name: str, config: Callable[[], ServeDeploySchema], **variables: str) -> str:
        """The address of the service of this name, which is started in place of another one.

        Args:
            variables: of the environment of its processes.
        """
        if name != self._name:
            self.stop()
            # What starts it adds variables too: they stay as long as it runs.
            self._to_stop.enter_context(patch.dict(os.environ, variables))
            self._url = self._to_stop.enter_context(local_service(of_tests(config()), Console(stderr=True)))
            self._name = name
        return self._url

    def stop(self) -> None:
        self._name = None
        self._to_stop.close()


RUNNING = RunningService()


@dataclass(frozen=True)
class SimulatedService:
    """A service on a simulated engine behind TLS and keys, with two replicas of its ingress and its environments.

    Attributes:
        folder: where the environments write down what they do.
    """

    url: str
    config: ServeDeploySchema
    folder: Path
    trusted: ssl.SSLContext
    keys: dict[str, str]

    @property
    def keys_file(self) -> Path:
        return self.folder / "keys.yaml"

    def of_client(self, name: str = "admin") -> dict[str, Any]:
        """The arguments of a client of httpx with the key of this name."""
        headers = {"authorization": f"Bearer {self.keys[name]}"}
        return {"base_url": self.url, "headers": headers, "verify": self.trusted, "timeout": None}

    def http(self, name: str = "admin") -> httpx.Client:
        return httpx.Client(**self.of_client(name))

    def client(self, name: str = "admin", **options: Any) -> RolloutClient:
        http = httpx.Client(verify=self.trusted, timeout=None)
        return RolloutClient(self.url, api_key=self.keys[name], http_client=http, **options)

    def add_key(self, name: str, *scopes: str, known_as: str | None = None) -> None:
        """Args: `known_as` is its name in `keys`, if that is another one."""
        key = new_key()
        _add(_entry_of(name, key, list(scopes)), self.keys_file)
        self.keys[known_as or name] = key

    def remove_key(self, name: str) -> None:
        """Removes the oldest of this name."""
        entries = yaml.safe_load(self.keys_file.read_text())["keys"]
        entries.remove(next(entry for entry in entries if entry["name"] == name))
        self.keys_file.write_text(yaml.safe_dump({"keys": entries}))


def replicas_of(counts: dict[str, int]) -> list[DeploymentSchema]:
    """So many of each deployment, which hardly reserve a core."""
    cores = RayActorOptionsSchema(num_cpus=0.1)
    return [DeploymentSchema(name=name, num_replicas=count, ray_actor_options=cores) for name, count in counts.items()]


def simulated_config(environments: dict[str, Any], **arguments: Any) -> ServeDeploySchema:
    """The config of the scale model with these environments and one engine, and with `arguments` for the service."""
    config = read_config(SIMULATED, port=free_port())
    [application] = config.applications
    application.args |= {"environments": environments, **arguments}
    application.deployments = replicas_of(dict.fromkeys(("Ingress", "Generator", *environments), 1))
    return config


def shared_simulated_config(folder: Path, certificate: Certificate) -> ServeDeploySchema:
    """Whose environments write into `folder`, where the keys' file is too."""
    in_folder = {"waiting": {"ended_folder": str(folder)}, "holding": {"folder": str(folder)}}
    paths = {
        "waiting": "waiting_environment:WaitingEnvironment",
        "holding": "holding_environment:HoldingEnvironment",
        "following": "following_environment:FollowingEnvironment",
        ENDLESS: "abandoned_rollouts:EndlessEnvironment",
    }
    config = simulated_config(
        {
            name: {"import_path": f"tests.live.{path}", "arguments": in_folder.get(name, {})}
            for name, path in paths.items()
        },
        access={"keys_file": str(folder / "keys.yaml")},
        images={"max_bytes": IMAGES_BYTES, "keep_s": 0},
        jobs={"lease_s": LEASE_S},
        # Steps wait for as long as a test does.
        limits={"step_timeout_s": None},
    )
    config.http_options.host = "0.0.0.0"
    config.http_options.ssl_certfile, config.http_options.ssl_keyfile = map(
        str, (certificate.certificate, certificate.key)
    )
    [application] = config.applications
    counts = {"Ingress": REPLICAS, "Generator": 1, "following": 1, "waiting": REPLICAS, "holding": REPLICAS, ENDLESS: 1}
    application.deployments = replicas_of(counts)
    return config
