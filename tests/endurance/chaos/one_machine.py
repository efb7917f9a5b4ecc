"""The service on this machine that chaos is made in: two replicas of each deployment that can have two."""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import psutil
from ray import serve
from ray.serve._private.common import ReplicaState
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema, ServeDeploySchema

from benchmarks.process_group import answers
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service
from service.startup.readiness import deploy
from tests.endurance.chaos.counted_puzzle import counted_puzzle
from tests.endurance.chaos.parts import KILLED, PARTS, TASK_NAME
from tests.endurance.chaos.rounds import POLL_S, Struck
from tests.endurance.program import console
from tests.endurance.soak.soaked_service import CPU_CONFIG, ENVIRONMENT

REPLICAS = 2
CORES = {"Ingress": 0.1, TASK_NAME: 0.1}
"""Reserved for one replica. The generators get the rest of two cores."""
GENERATOR_CORES = 0.6
DTYPE = "float32"
"""A generation that is made again computes its prompt where the first computed tokens. In bfloat16 that rounds so
differently that now and then another token is the likeliest."""
HANG_TIMEOUT_S = 10


class OneMachine(Struck):
    """Its processes run below this one."""

    def __init__(self, url: str, replicas: Mapping[str, int], settings: ServeDeploySchema | None = None) -> None:
        """Args:
        replicas: how many each deployment should have.
        settings: of the service; `None` if none of its deployments is scaled.
        """
        self.url = url
        self._settings = settings
        self._replicas = replicas

    def shared(self, kind: str) -> object:
        # Two parts of one deployment share its replicas.
        part = PARTS[kind]
        return part.deployment or part

    async def is_whole(self, kind: str) -> bool:
        part = PARTS[kind]
        if part.deployment is None:
            return bool(part.processes()) and await asyncio.to_thread(answers, f"{self.url}/healthz")
        wanted = self._replicas[part.deployment]
        # Of a generator, its engine's processes too: one that a dead replica has left behind is one too many.
        found = {k: len(other.processes()) for k, other in KILLED.items() if other.deployment == part.deployment}
        if not found.get("engine-worker", wanted):
            # An engine on one device works in its own process.
            del found["engine-worker"]
        if any(count != wanted for count in found.values()):
            return False
        return await asyncio.to_thread(running_replicas, part.deployment) == wanted

    def strike(self, kind: str, draw: random.Random) -> Callable[[], Awaitable[bool]]:
        part = PARTS[kind]
        if part.sent is None:
            return self._drain(kind)
        return self.strike_process(kind, draw.choice(part.processes()))

    def strike_process(self, kind: str, victim: psutil.Process) -> Callable[[], Awaitable[bool]]:
        """Strikes this process of a part that gets a signal. What is returned tells whether it was replaced."""
        sent = PARTS[kind].sent
        assert sent is not None
        victim.send_signal(sent)

        async def is_replaced() -> bool:
            return is_gone(victim) and await self.is_whole(kind)

        return is_replaced

    def _drain(self, kind: str) -> Callable[[], Awaitable[bool]]:
        deployment, settings = PARTS[kind].deployment, self._settings
        assert deployment is not None
        assert settings is not None
        scaling = asyncio.create_task(scale_down_and_up(settings, deployment))

        async def is_replaced() -> bool:
            if scaling.done():
                scaling.result()
            return scaling.done() and await self.is_whole(kind)

        return is_replaced


async def scale_down_and_up(settings: ServeDeploySchema, deployment: str) -> None:
    await asyncio.to_thread(scale, settings, deployment, 1)
    while await asyncio.to_thread(running_replicas, deployment) > 1:
        await asyncio.sleep(POLL_S)
    await asyncio.to_thread(scale, settings, deployment, REPLICAS)


def scale(settings: ServeDeploySchema, deployment: str, replicas: int) -> None:
    """Asks Serve for so many replicas of a deployment."""
    [application] = settings.applications
    [scaled] = [each for each in application.deployments if each.name == deployment]
    scaled.num_replicas = replicas
    deploy(settings)


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def running_replicas(deployment: str) -> int:
    """Waits while Serve's controller restarts."""
    found = serve.status().applications["rollout"].deployments[deployment]
    return found.replica_states.get(ReplicaState.RUNNING, 0)


def config_of_one_machine(steps_file: Path) -> ServeDeploySchema:
    """A config with only the task that is played, and two replicas of each deployment but the stores.

    Args:
        steps_file: the steps of the task are written there.
    """
    settings = read_config(CPU_CONFIG, port=free_port())
    [application] = settings.applications
    application.args["environments"] = {TASK_NAME: counted_puzzle(steps_file)}
    application.args["engine"] |= {
        "dtype": DTYPE,
        # Else the worker of an engine on one device shares its process, and there is none to strike.
        "distributed_executor_backend": "mp",
        "num_cpus": GENERATOR_CORES,
        "hang_timeout_s": HANG_TIMEOUT_S,
    }
    application.deployments = [DeploymentSchema(name="Generator", num_replicas=REPLICAS)]
    for name, cores in CORES.items():
        options = RayActorOptionsSchema(num_cpus=cores)
        application.deployments.append(DeploymentSchema(name=name, num_replicas=REPLICAS, ray_actor_options=options))
    return settings


@contextmanager
def one_machine(steps_file: Path) -> Iterator[OneMachine]:
    """Runs the service for the length of the block."""
    settings = config_of_one_machine(steps_file)
    replicas = {"Generator": REPLICAS, "Policy": 1, "Jobs": 1, **dict.fromkeys(CORES, REPLICAS)}
    with patch.dict(os.environ, ENVIRONMENT), local_service(settings, console) as url:
        yield OneMachine(url, replicas, settings)
