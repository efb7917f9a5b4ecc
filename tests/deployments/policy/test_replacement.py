"""The replicas together: loading weights into one of them, and replacing those that fail."""

import asyncio

import pytest

from deployments.policy.commands import CommandCosts, CommandReport, LoadedWeights, ReplicaRegistration
from deployments.policy.replica_registry import ReplicaLost, ReplicaRegistry, error_of
from rollout_client.contract.policy import ReplicaUpdate
from tests import virtual_time
from tests.deployments.policy.policy_world import a_payload
from tests.deployments.policy.scripted_replicas import RegistryCommandSource, ScriptedCluster, ScriptedReplica
from tests.virtual_time import until


def registry_of(*names: str) -> tuple[ReplicaRegistry, ScriptedCluster]:
    cluster = ScriptedCluster()
    registry = ReplicaRegistry(cluster, command_timeout_s=60.0)
    for name in names:
        actor = ScriptedReplica(name, RegistryCommandSource(registry), cluster)
        registry.register(ReplicaRegistration(name, actor, workers=1))
    return registry, cluster


def test_a_replica_that_is_replaced_is_ended_forgotten_and_logged_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry, cluster = registry_of("r0", "r1")
    registry.replace(registry.replicas[0], "out of memory", version=7)
    assert (cluster.killed, [replica.replica_id for replica in registry.replicas]) == (["r0"], ["r1"])
    [record] = caplog.records
    assert (record.name, record.levelname) == ("rollout_service.policy", "WARNING")
    assert record.getMessage() == "A generator replica is replaced: out of memory"
    assert (vars(record)["replica_id"], vars(record)["version"]) == ("r0", 7)


def test_a_replica_that_has_left_is_neither_ended_nor_logged(caplog: pytest.LogCaptureFixture) -> None:
    registry, cluster = registry_of("r0")
    [replica] = registry.replicas
    registry.forget("r0", "it died")
    registry.replace_if_registered(replica, "out of memory")
    assert (cluster.killed, caplog.records) == ([], [])


@virtual_time.test
async def test_nothing_is_generated_with_full_weights_before_their_adapter_is_loaded() -> None:
    registry, cluster = registry_of("r0")
    actor = await ScriptedReplica("r0", RegistryCommandSource(registry), cluster, command_s=1.0).start()
    [replica] = registry.replicas
    loading = asyncio.create_task(registry.load(replica, [a_payload(1), a_payload(2, "adapter")]))
    await until(lambda: actor.loaded == LoadedWeights(1))
    assert actor.is_on_trial
    assert await loading
    assert (actor.loaded, actor.is_on_trial) == (LoadedWeights(1, adapter=2), False)
    actor.end()


def test_the_outcome_of_a_success_has_the_times_of_its_commands() -> None:
    registry, cluster = registry_of("r0")
    [replica] = registry.replicas
    swapped = CommandReport(2, LoadedWeights(7), costs=CommandCosts(swap_s=2.0, pause_s=3.0))
    assert registry.outcome(
        replica, swapped, version=7, costs=CommandCosts(load_s=1.0, fetched_bytes=10) + swapped.costs
    ) == ReplicaUpdate(replica_id="r0", status="swapped", load_s=1.0, fetched_bytes=10, swap_s=2.0, pause_s=3.0)
    assert cluster.killed == []


@pytest.mark.parametrize("result", [CommandReport(1, LoadedWeights(), error="it failed"), ReplicaLost("it failed")])
def test_the_outcome_of_a_failure_is_a_replacement_with_the_error(result: CommandReport | ReplicaLost) -> None:
    registry, cluster = registry_of("r0")
    [replica] = registry.replicas
    expected = ReplicaUpdate(replica_id="r0", status="replaced", error="it failed")
    assert (error_of(result), registry.outcome(replica, result, version=7)) == ("it failed", expected)
    assert cluster.killed == ["r0"]
