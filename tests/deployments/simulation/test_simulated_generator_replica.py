"""What becomes of weights that are pushed to a simulated replica."""

import asyncio
from pathlib import Path

import pytest

from deployments.policy.failures import WeightsRefused
from deployments.policy.replicas.commands import ReplicaRegistration
from deployments.policy.settings import PolicySettings
from deployments.policy.store import PolicyStore
from deployments.simulation.simulated_generator_replica import NO_WEIGHTS, refuse_weights
from rollout_client.policy_contract import PushOptions
from tests.deployments.policy.scripted_replicas import ScriptedCluster, ScriptedReplica
from tests.paths import TINY_MODEL
from tests.virtual_time import run, settled


def test_pushed_weights_are_refused_with_a_reason_and_the_replica_stays_at_version_0(tmp_path: Path) -> None:
    async def push() -> None:
        cluster = ScriptedCluster()
        store = PolicyStore(PolicySettings(folder=str(tmp_path)), str(TINY_MODEL), cluster=cluster, settle_s=0.0)
        replica = ScriptedReplica("simulated", store, cluster)
        refusing = asyncio.create_task(refuse_weights(store, ReplicaRegistration("simulated", replica, 1)))
        await settled()
        data = (TINY_MODEL / "model.safetensors").read_bytes()
        sender = await store.begin_chunk(1, 0)
        await store.write_chunk(1, sender, 0, data)
        await store.end_chunk(1, sender, len(data), len(data))
        with pytest.raises(WeightsRefused, match=NO_WEIGHTS):
            await store.complete_upload(1, sender, PushOptions(), False, None)
        state = await store.state(0.0)
        assert (state.current, [(member.replica_id, member.version) for member in state.replicas]) == (
            0,
            [("simulated", 0)],
        )
        assert cluster.killed == []
        refusing.cancel()

    run(push())
