"""What becomes of weights that are pushed to a simulated replica: only their number."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from benchmarks.simulation.simulated_engine import SimulatedEngine
from benchmarks.simulation.simulated_generator_replica import NO_WEIGHTS, SimulatedWeights
from benchmarks.simulation.timing import Timing
from deployments.policy.commands import CommandReport, InitTransfer, LoadedWeights, ReplicaRegistration
from deployments.policy.replica_registry import ReplicaRegistry
from deployments.policy.settings import PolicySettings
from deployments.policy.store import PolicyStore
from deployments.protocols.generation import GenerationRequest, SamplingOptions, WeightSpan
from deployments.protocols.replicas import GeneratorDescription
from rollout_client.contract.policy import PushOptions
from tests import virtual_time
from tests.deployments.policy.scripted_replicas import RegistryCommandSource, ScriptedCluster, ScriptedReplica
from tests.paths import TINY_MODEL
from tests.virtual_time import now, run, settled


class Simulated:
    """A store, and a simulated replica that has registered with it."""

    def __init__(self, folder: Path, timing: Timing) -> None:
        self.cluster = ScriptedCluster()
        self.folder = folder
        description = GeneratorDescription("m", max_model_len=64, vocab_size=70)
        self.engine = SimulatedEngine(timing, description, [65])
        self.start_store()
        actor = ScriptedReplica("simulated", self.store, self.cluster)
        self.weights = SimulatedWeights(self.engine, self.store, ReplicaRegistration("simulated", actor, 1), timing)

    def start_store(self) -> None:
        settings = PolicySettings(folder=str(self.folder))
        self.store = PolicyStore(settings, str(TINY_MODEL), cluster=self.cluster)

    async def push(self, version: int, **options: Any) -> None:
        data = (TINY_MODEL / "model.safetensors").read_bytes()
        sender = await self.store.write_chunk(version, None, 0, data)
        update = await self.store.complete_upload(version, sender, PushOptions(**options), False, None)
        assert [replica.status for replica in update.replicas] == ["swapped"]


def play(
    story: Callable[[Simulated], Coroutine[Any, Any, None]],
    folder: Path,
    timing: Timing = Timing(time_per_token_s=1.0),  # noqa: B008 - is frozen
) -> None:
    async def told() -> None:
        world = Simulated(folder, timing)
        running = asyncio.create_task(world.weights.run())
        await settled()
        await story(world)
        running.cancel()
        assert world.cluster.killed == []

    run(told())


def generation(name: str, tokens: int = 8) -> GenerationRequest:
    return GenerationRequest(name, [1], tokens, (), SamplingOptions())


def test_a_pushed_version_labels_the_tokens_that_follow(tmp_path: Path) -> None:
    async def story(world: Simulated) -> None:
        running = asyncio.create_task(world.engine.generate(generation("a")))
        await asyncio.sleep(2.5)
        await world.push(4)
        assert (await running).weight_versions == (WeightSpan("0", 0, 2), WeightSpan("4", 2, 8))
        assert (await world.engine.generate(generation("b"))).weight_versions == (WeightSpan("4", 0, 8),)
        state = await world.store.state(0.0)
        assert (state.current, [replica.version for replica in state.replicas]) == (4, [4])
        assert world.weights.loaded == LoadedWeights(4)

    play(story, tmp_path)


def test_with_abort_what_runs_is_interrupted_with_the_tokens_of_the_old_version(tmp_path: Path) -> None:
    async def story(world: Simulated) -> None:
        running = asyncio.create_task(world.engine.generate(generation("a")))
        await asyncio.sleep(2.5)
        await world.push(1, mode="abort")
        interrupted = await running
        assert (interrupted.finish_reason, interrupted.weight_versions) == ("abort", (WeightSpan("0", 0, 2),))

    play(story, tmp_path)


def test_with_wait_what_runs_keeps_its_version(tmp_path: Path) -> None:
    async def story(world: Simulated) -> None:
        running = asyncio.create_task(world.engine.generate(generation("a")))
        await asyncio.sleep(2.5)
        await world.push(1, mode="wait")
        assert (await running).weight_versions == (WeightSpan("0", 0, 8),)

    play(story, tmp_path)


def test_two_updates_without_a_token_between_them_leave_one_span(tmp_path: Path) -> None:
    async def story(world: Simulated) -> None:
        running = asyncio.create_task(world.engine.generate(generation("a", 2)))
        await asyncio.sleep(1.5)
        await world.push(1)
        await world.push(2)
        assert (await running).weight_versions == (WeightSpan("0", 0, 1), WeightSpan("2", 1, 2))

    play(story, tmp_path)


@virtual_time.test
async def test_a_transfer_is_refused_with_a_reason() -> None:
    registry = ReplicaRegistry(ScriptedCluster(), command_timeout_s=10.0)
    engine = SimulatedEngine(Timing(), GeneratorDescription("m", max_model_len=64, vocab_size=70), [65])
    registration = ReplicaRegistration("simulated", None, 1)
    weights = SimulatedWeights(engine, RegistryCommandSource(registry), registration, Timing())
    running = asyncio.create_task(weights.run())
    await settled()
    [replica] = registry.replicas
    report = await registry.send(replica, InitTransfer({}, 30.0), timeout_s=10.0)
    assert isinstance(report, CommandReport)
    assert (report.error, report.broken, report.loaded) == (NO_WEIGHTS, False, LoadedWeights(0))
    running.cancel()


def test_weights_are_read_beside_generations_and_replaced_in_a_pause(tmp_path: Path) -> None:
    async def story(world: Simulated) -> None:
        running = asyncio.create_task(world.engine.generate(generation("a")))
        await asyncio.sleep(0.5)
        await world.push(4)
        assert now() == 0.5 + 3.0 + 10.0
        assert (await running).weight_versions == (WeightSpan("0", 0, 3), WeightSpan("4", 3, 8))
        assert now() == 8.0 + 10.0

    play(story, tmp_path, Timing(time_per_token_s=1.0, stage_s=3.0, swap_s=10.0))
