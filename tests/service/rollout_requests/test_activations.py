"""Rollouts while versions follow one another, in virtual time.

Ingress, policy store and replicas are the service's own, in one process; the engines are simulated.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from benchmarks.simulation.simulated_engine import SimulatedEngine
from benchmarks.simulation.simulated_generator_replica import SimulatedWeights
from benchmarks.simulation.timing import Timing
from deployments.generation.generator_replica_base import GeneratorReplicaBase
from deployments.policy.commands import ReplicaRegistration
from deployments.policy.failures import PolicyNotCurrent
from deployments.policy.settings import PolicySettings
from deployments.policy.store import PolicyStore
from deployments.protocols.generation import GenerationRequest
from deployments.protocols.weight_versions import refuse_other_version
from rollout_client.contract.policy import SwitchOptions
from rollout_client.contract.rollouts import RolloutRequest
from service.admission.admission import Admission
from service.remote.generator import RemoteGenerator
from service.remote.policy import RemotePolicy
from service.rollout_requests.episodes import EpisodeFactory
from service.rollout_requests.rollout_service import RolloutService
from service.rollout_requests.task_samples import TaskSampler
from service.settings import AdmissionSettings, RequestLimits
from tests import virtual_time
from tests.deployments.policy.scripted_replicas import ScriptedReplica
from tests.fakes.cluster import ScriptedCluster
from tests.fakes.in_process_handle import InProcessHandle
from tests.paths import TINY_MODEL
from tests.service.rollout_requests.version_demands import Asked, policy_for, problems_of
from tests.service.scripted import ScriptedEnvironment, outcome
from tests.service.scripted_http import DESCRIPTION, tokenizer

REPLICAS, CALLERS, NEW_TOKENS = 8, 48, 12
TIMING = Timing(time_per_token_s=0.1, max_num_seqs=4, stage_s=0.3, swap_s=0.4)
Activation = Literal["rolling", "together"]


class Replica(GeneratorReplicaBase):
    def __init__(self, name: str, store: PolicyStore, cluster: ScriptedCluster, timing: Timing) -> None:
        engine = SimulatedEngine(timing, replace(DESCRIPTION, max_num_seqs=timing.max_num_seqs), [65])
        super().__init__(engine)
        actor = ScriptedReplica(name, store, cluster)
        self.weights = SimulatedWeights(engine, store, ReplicaRegistration(name, actor, 1), timing)
        self.asked: list[tuple[GenerationRequest, int | None]] = []
        """Each generation that was sent here, and the version at that moment."""
        self.served: list[tuple[GenerationRequest, int | None]] = []

    def refuse_other_weights(self, request: GenerationRequest) -> None:
        loaded = self.weights.version_of(request.policy)
        self.asked.append((request, loaded))
        refuse_other_version(request, loaded)
        self.served.append((request, loaded))


class Fleet:
    """An ingress over a store and replicas, and what has come back."""

    def __init__(self, folder: Path, activation: Activation, timing: Timing) -> None:
        cluster = ScriptedCluster()
        settings = PolicySettings(folder=str(folder), activation=activation)
        self.store = PolicyStore(settings, str(TINY_MODEL), cluster=cluster)
        self.replicas = {name: Replica(name, self.store, cluster, timing) for name in map(str, range(REPLICAS))}
        handle = InProcessHandle(self.replicas)
        self.generator = RemoteGenerator(handle.unchecked, window_factor=1.25)
        self.policy = RemotePolicy(self.store, on_rolling=self.generator.note_rolling)
        environments = {"math": ScriptedEnvironment([outcome(terminated=True)])}
        limits = RequestLimits()
        self.service = RolloutService(
            self.generator,
            environments,
            self.policy,
            EpisodeFactory(frozenset(environments), DESCRIPTION, tokenizer, limits),
            limits,
            Admission(AdmissionSettings(), DESCRIPTION.max_model_len),
            TaskSampler(environments),
        )
        self.current = self.pushed = 0
        self.asked = 0
        self.outcomes = Counter[str]()
        self.problems: list[str] = []
        self.is_over = False

    @asynccontextmanager
    async def called(self, is_choosy: bool) -> AsyncIterator[None]:
        """Callers play one rollout after the other for the length of the block, and to the end of the last one."""
        running = [asyncio.create_task(replica.weights.run()) for replica in self.replicas.values()]
        watching = asyncio.create_task(self.policy.run())
        await self.generator.describe()
        await virtual_time.until(lambda: len(self.store.registry.started) == REPLICAS)
        calling = [asyncio.create_task(self.call(random.Random(seed), is_choosy)) for seed in range(CALLERS)]
        yield
        self.is_over = True
        await asyncio.gather(*calling)
        for task in (*running, watching):
            task.cancel()

    async def call(self, drawn: random.Random, is_choosy: bool) -> None:
        while not self.is_over:
            asked = Asked(policy_for(drawn, self.current) if is_choosy else {}, self.current)
            request = RolloutRequest.model_validate(
                {
                    "samples": [{"task_name": "math", "messages": [{"role": "user", "content": str(drawn.random())}]}],
                    "sampling": {"max_new_tokens": NEW_TOKENS},
                    "policy": {**asked.policy, "wait_s": 5},
                }
            )
            self.asked += 1
            try:
                async with aclosing(await self.service.rollout(request, f"request-{self.asked}", 1)) as results:
                    [sample] = [result.model_dump(warnings=False) async for _, result in results]
            except PolicyNotCurrent:
                self.outcomes["conflict"] += 1
                if not self.is_over and "version" not in asked.policy:
                    self.problems.append(f"{asked}: refused")
                continue
            self.outcomes[sample["status"]] += 1
            self.problems += map(partial("{}: {}: {}".format, asked, sample), problems_of(asked, sample, self.pushed))

    async def push(self) -> None:
        self.pushed = self.current + 1
        update = await self.store.roll_back(0, self.pushed, SwitchOptions())
        assert {each.status for each in update.replicas} == {"swapped"}
        self.current = self.pushed


@pytest.mark.parametrize("updates", [4, pytest.param(200, marks=[pytest.mark.long, pytest.mark.slow])])
@pytest.mark.parametrize("activation", ["rolling", "together"])
async def test_no_rollout_is_lost_or_of_a_refused_version(tmp_path: Path, activation: Activation, updates: int) -> None:
    fleet = Fleet(tmp_path, activation, TIMING)
    async with fleet.called(is_choosy=True):
        for _ in range(updates):
            await fleet.push()
    assert fleet.problems == []
    assert fleet.outcomes.total() == fleet.asked > 10 * updates
    assert fleet.outcomes["completed"] > fleet.asked / 2
    served: list[Any] = [each for replica in fleet.replicas.values() for each in replica.served]
    assert all(request.min_weight_version <= version for request, version in served)
    assert all(request.weight_version in (None, version) for request, version in served)
    sent: list[Any] = [each for replica in fleet.replicas.values() for each in replica.asked]
    assert all(request.min_weight_version <= version for request, version in sent), "a replica had to refuse it"
