"""Gives nodes of a running service notice, one after the other, while rollouts are played, and prints what came back.

`python -m tests.live.leaving_nodes FOLDER ROUNDS`; the last line is JSON, the fields of `Findings`. It is a program,
because Ray and Serve read their environment when they are imported. Each node is a `ray start --block` of this machine
with a generator replica and a replica of the environment. The head has everything else, and stays.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.schema import DeploymentSchema, ServeDeploySchema

from rollout_client import AsyncRolloutClient
from rollout_client.contract.rollouts import SampleInput, Sampling
from service.startup.local_service import require_cluster_token
from service.startup.processes import wait_for_ends
from service.startup.readiness import deploy, deployments_not_ready
from tests.endurance.chaos.counted_puzzle import StepLog, counted_puzzle, turns_done_again
from tests.endurance.chaos.parts import TASK_NAME
from tests.endurance.soak.callers import calling
from tests.live.services import simulated_config

NODES = 3
WITHIN_S = 8.0
"""Of a notice: then the node is gone."""
AT_ONCE = 24
TURNS = 2
TOKENS_A_TURN = 120
TIMING = {"time_to_first_token_s": 0.2, "time_per_token_s": 0.05, "max_num_seqs": 256}
BETWEEN_S = 2.0
WHOLE_WITHIN_S = 120.0
POLL_S = 0.25
LEAVING = "leaving"
"""The resource of the nodes that leave."""


@dataclass
class Findings:
    rounds: int = 0
    rollouts: int = 0
    """All that were played, in quiet times and under notices."""
    lost: int = 0
    """Rollouts that failed, or whose turns are not as long as asked for. None may be tried again (`retries: 0`)."""
    turns_done_again: int = 0
    moved: int = 0
    """Rollouts with a turn that one replica began and another one ended."""
    errors: list[str] = field(default_factory=list)
    """Of the rollouts that failed."""


class LeavingNode:
    """A Ray node of this machine that can be given notice."""

    def __init__(self, address: str, number: int) -> None:
        self.name = f"leaving-{number}"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--block"]
        options = ["--num-cpus=4", "--object-store-memory=100000000", "--disable-usage-stats"]
        # Several nodes of one machine must not want the same ports.
        own = ["--min-worker-port=0", "--max-worker-port=0", "--node-manager-port=0", "--dashboard-agent-listen-port=0"]
        marks = [f"--labels=name={self.name}", "--resources", json.dumps({LEAVING: 4})]
        environment = {**os.environ, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(WITHIN_S)}
        self._process = subprocess.Popen([*command, *options, *own, *marks], env=environment, stdout=subprocess.DEVNULL)

    def node_id(self) -> str | None:
        """`None` while it has not joined the cluster."""
        named = [node for node in ray.nodes() if node["Labels"].get("name") == self.name]  # type: ignore[no-untyped-call]
        return named[0]["NodeID"] if named and named[0]["Alive"] else None

    def below(self) -> list[psutil.Process]:
        return psutil.Process(self._process.pid).children(recursive=True)

    def terminate(self) -> None:
        """The notice of an orchestrator: SIGTERM to the process that it has started."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """The machine is gone."""
        ended = self.below() if self._process.poll() is None else []
        for process in ended:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.kill()
        self._process.wait()
        wait_for_ends(ended, WITHIN_S)


def config_of(steps_file: Path) -> ServeDeploySchema:
    """A generator and an environment on each node that leaves; everything else is on the head."""
    config = simulated_config({TASK_NAME: counted_puzzle(steps_file)}, jobs=None)
    [application] = config.applications
    application.args["engine"]["simulated"] = TIMING
    on_leaving: dict[str, Any] = {
        "num_replicas": NODES,
        "max_replicas_per_node": 1,
        # As in serve_config.yaml: much longer than a notice.
        "graceful_shutdown_timeout_s": 600,
        "ray_actor_options": {"num_cpus": 0.1, "resources": {LEAVING: 1}},
    }
    on_head: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0.1, "resources": {"head": 1}}}
    places = {"Generator": on_leaving, TASK_NAME: on_leaving, "Ingress": on_head, "Policy": on_head}
    application.deployments = [
        DeploymentSchema.model_validate({"name": name, **options}) for name, options in places.items()
    ]
    return config


async def play_one(client: AsyncRolloutClient, sample: SampleInput, findings: Findings, number: int) -> None:
    if number < AT_ONCE:
        await asyncio.sleep(number / AT_ONCE * TOKENS_A_TURN * TIMING["time_per_token_s"])
    game = sample.model_copy(update={"extra_env_info": {**(sample.extra_env_info or {}), "game": number}})
    sampling = Sampling(greedy=True, max_new_tokens=TOKENS_A_TURN)
    response = await client.rollout([game], sampling=sampling, max_rollout_turns=TURNS, sample_retries=0)
    [result] = response.samples
    findings.rollouts += 1
    if result.error is not None:
        findings.errors.append(result.error.message)
    if result.status == "error" or result.metrics.turn_gen_tokens != [TOKENS_A_TURN] * TURNS:
        findings.lost += 1
        return
    findings.moved += result.replay is not None and any(origin.start > 0 for origin in result.replay.generations)


async def until(holds: Any) -> None:
    async with asyncio.timeout(WHOLE_WITHIN_S):
        while not await asyncio.to_thread(holds):
            await asyncio.sleep(POLL_S)


def is_whole(nodes: list[LeavingNode]) -> bool:
    ids = [node.node_id() for node in nodes]
    status = serve.status().applications["rollout"].deployments
    running = all(dict(status[name].replica_states) == {"RUNNING": NODES} for name in ("Generator", TASK_NAME))
    return all(ids) and running


async def rounds(findings: Findings, number_of_rounds: int, address: str, nodes: list[LeavingNode], url: str) -> None:
    numbers = count(NODES)
    async with AsyncRolloutClient(url) as client:
        [sample] = await client.example_samples(TASK_NAME, 1, seed=1)
        async with calling([partial(play_one, client, sample, findings)] * AT_ONCE, findings.errors):
            for _ in range(number_of_rounds):
                leaving = nodes.pop(0)
                # The machine that takes its place is ordered when the notice comes.
                nodes.append(LeavingNode(address, next(numbers)))
                await give_notice_to(leaving)
                await until(lambda: is_whole(nodes))
                await asyncio.sleep(BETWEEN_S)
                findings.rounds += 1


async def give_notice_to(node: LeavingNode) -> None:
    """Returns when the machine is gone, as long after the notice as it said."""
    began = monotonic()
    node.terminate()
    await asyncio.sleep(max(began + WITHIN_S - monotonic(), 0))
    await asyncio.to_thread(node.kill)


def main(folder: Path, number_of_rounds: int) -> dict[str, Any]:
    findings, steps_file = Findings(), folder / "steps"
    require_cluster_token()
    head: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 200 * 2**20, "resources": {"head": 10}}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    nodes: list[LeavingNode] = []
    try:
        ray.init(cluster.address, namespace="serve", log_to_driver=False)
        config = config_of(steps_file)
        deploy(config)
        # One after the other: Serve gives its proxy up where a busy machine has not started it in time.
        for number in range(NODES):
            nodes.append(LeavingNode(cluster.address, number))
            asyncio.run(until(lambda: nodes[-1].node_id() is not None))
        for _ in deployments_not_ready(config):
            pass
        url = f"http://127.0.0.1:{config.http_options.port}"
        asyncio.run(rounds(findings, number_of_rounds, cluster.address, nodes, url))
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
        for node in nodes:
            node.kill()
        cluster.shutdown()
    findings.turns_done_again = turns_done_again(StepLog(steps_file).since(0)).total()
    return asdict(findings)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))) + "\n")
