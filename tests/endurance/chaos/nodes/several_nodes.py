"""The service on three Ray nodes of this machine, of which a whole node is killed, or the head.

Each node is a network namespace. Ray keeps the state of its head (GCS) in a real Redis, which lives on. The engines are
simulated: what is struck here are nodes, not engines.
"""

import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import httpx
import yaml
from dotenv import dotenv_values

from rollout_client.contract.info import Ready
from rollout_client.contract.policy import PolicyState
from service.startup.config import REPOSITORY
from tests.deployments.storage.test_storages import running_redis
from tests.endurance.chaos.counted_puzzle import counted_puzzle
from tests.endurance.chaos.nodes import deploying
from tests.endurance.chaos.nodes.namespaces import BRIDGE_ADDRESS, Namespace, namespaces
from tests.endurance.chaos.parts import TASK_NAME
from tests.endurance.chaos.rounds import Struck
from tests.endurance.program import console
from tests.paths import TINY_MODEL

HEAD, ASKED, OTHER = range(3)
"""The places of the nodes: the head, the one whose proxy is asked, and another one."""
NODE_KINDS = {"node": OTHER, "head": HEAD}
"""By the kind of a round, which node it kills."""
DOWN_S = 2.0
"""How long the machine of a killed node takes until Ray is started on it again."""
REDIS_PORT, GCS_PORT, HTTP_PORT = 6390, 6379, 8000
REDIS = f"{BRIDGE_ADDRESS}:{REDIS_PORT}"
OBJECT_STORE_BYTES = 100 * 2**20
STARTED_WITHIN_S = 600.0
"""Three engines that start at the same time on two busy cores take minutes."""
ANSWER_WITHIN_S = 8.0


class SeveralNodes(Struck):
    def __init__(self, nodes: list[Namespace], environment: Mapping[str, str], temporary: Path) -> None:
        self.url = f"http://{nodes[ASKED].address}:{HTTP_PORT}"
        self._nodes = nodes
        self._environment = environment
        self._temporary = temporary
        self._starting: threading.Thread | None = None

    def start(self, config: Path) -> None:
        """Starts Ray on all nodes, then the service."""
        for node in self._nodes:
            self._start_ray(node)
        head = self._nodes[HEAD]
        self._run(head, "-m", deploying.__name__, str(config), f"{head.address}:{GCS_PORT}")

    def shared(self, kind: str) -> object:
        return self

    async def is_whole(self, kind: str) -> bool:
        """Each node has its replicas, and all of them answer."""
        if self._starting is not None and self._starting.is_alive():
            return False
        try:
            async with httpx.AsyncClient(base_url=self.url, timeout=ANSWER_WITHIN_S) as client:
                ready = Ready.model_validate_json((await client.get("/readyz")).raise_for_status().content)
                policy = PolicyState.model_validate_json((await client.get("/policy")).raise_for_status().content)
        except httpx.HTTPError:
            return False
        return not ready.degraded and len(policy.replicas) == len(self._nodes)

    def strike(self, kind: str, draw: random.Random) -> Callable[[], Awaitable[bool]]:
        node = self._nodes[NODE_KINDS[kind]]
        self._starting = threading.Thread(target=self._kill_and_start, args=(node,), daemon=True)
        self._starting.start()
        return lambda: self.is_whole(kind)

    def _kill_and_start(self, node: Namespace) -> None:
        node.kill()
        sleep(DOWN_S)
        # Ray sees the processes of the other nodes, and would take the head for one that still runs.
        (self._temporary / "ray_current_cluster").unlink(missing_ok=True)
        self._start_ray(node)

    def _start_ray(self, node: Namespace) -> None:
        head = self._nodes[HEAD]
        role = ["--head", f"--port={GCS_PORT}", f"--temp-dir={self._temporary}", "--include-dashboard=false"]
        if node is not head:
            role = [f"--address={head.address}:{GCS_PORT}"]
        self._run(
            node,
            *("-m", "ray.scripts.scripts", "start", f"--node-ip-address={node.address}", *role),
            *("--num-cpus=4", f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats"),
        )

    def _run(self, node: Namespace, *arguments: str) -> None:
        """Raises `RuntimeError` with the last lines that the program wrote, if it fails."""
        with tempfile.TemporaryFile("w+") as output:
            # Not a pipe: Ray's processes hold the output open after the command has ended.
            ended = subprocess.run(
                node.command(sys.executable, *arguments),
                cwd=REPOSITORY,
                env=dict(self._environment),
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=STARTED_WITHIN_S,
                check=False,
            )
            if ended.returncode:
                output.seek(0)
                last = output.read()[-4000:]
                raise RuntimeError(f"{' '.join(arguments[:4])} failed on {node.name}:\n{last}")


def config_of_nodes(steps_file: Path) -> dict[str, Any]:
    """A Serve config: a replica of each deployment on each node, but one policy store and one job store.

    Args:
        steps_file: the steps of the task are written there.
    """
    config: dict[str, Any] = yaml.safe_load((REPOSITORY / "serve_config.scale.yaml").read_text())
    [application] = config["applications"]
    simulated = {"time_to_first_token_s": 0.3, "time_per_token_s": 0.02, "max_num_seqs": 256}
    application["args"]["engine"] |= {"model": str(TINY_MODEL), "simulated": simulated}
    application["args"] |= {
        "environments": {TASK_NAME: counted_puzzle(steps_file)},
        "jobs": {"redis_url": f"redis://{REDIS}"},
        "access": {"guarded_by": "network namespaces that nothing outside of this machine reaches"},
    }
    one_a_node = {"num_replicas": 3, "max_replicas_per_node": 1}
    application["deployments"] = [{"name": name, **one_a_node} for name in ("Ingress", "Generator", TASK_NAME)]
    return config | {"proxy_location": "EveryNode", "http_options": {"host": "0.0.0.0", "port": HTTP_PORT}}


@contextmanager
def several_nodes(steps_file: Path) -> Iterator[SeveralNodes]:
    """Runs the service for the length of the block."""
    with (
        tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as name,
        namespaces(3) as nodes,
        running_redis("--port", str(REDIS_PORT), "--bind", BRIDGE_ADDRESS, "--protected-mode", "no"),
    ):
        temporary = Path(name)
        config = temporary / "config.json"
        config.write_text(json.dumps(config_of_nodes(steps_file)))
        given = {name: value or "" for name, value in dotenv_values(REPOSITORY / "serve.env").items()}
        own = {"RAY_REDIS_ADDRESS": REDIS, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        service = SeveralNodes(nodes, given | os.environ | own, temporary)
        with console.status("Starting Ray on three nodes, and the service"):
            service.start(config)
        yield service
