"""The steps of a weight transfer over scripted replicas, in virtual time."""

from collections.abc import Callable
from typing import Any

import pytest

from deployments.policy.commands import AbandonTransfer, Command, LoadedWeights, SaveTransfer, Stage, Swap
from deployments.policy.failures import TransferRefused
from deployments.policy.store import PolicyStore
from rollout_client.contract.policy import PolicyUpdate, SwitchOptions
from tests.deployments.policy.transferring_replicas import TransferringReplica
from tests.virtual_time import until

MakeStore = Callable[..., PolicyStore]
TRANSFER: dict[str, Any] = {"trainers": ["10.0.0.4:29500"]}
TRAINER = {"master_address": "10.0.0.4", "master_port": 29500}
WEIGHTS = {"names": ["a"]}
CHANGED = "the replicas have changed since the trainer was connected; call /policy/transfer/init again"
BACK: list[type[Command]] = [AbandonTransfer, Stage, Swap]
BROKE = "it broke, and the replicas go back to the weights before it: "


async def serving(store: PolicyStore, *workers: int, **script: Any) -> list[TransferringReplica]:
    """Replicas "a", "b", ... with so many workers each; `script` is that of the first."""
    scripts = [script] + [{}] * (len(workers) - 1)
    replicas = [
        TransferringReplica(store, name, count, **said)
        for name, count, said in zip("abcdef", workers, scripts, strict=False)
    ]
    return [await replica.register_and_serve() for replica in replicas]


async def meet(store: PolicyStore, world_size: int) -> int:
    return await store.init_transfer({**TRAINER, "rank_offset": 1, "world_size": world_size})


async def transfer(store: PolicyStore) -> PolicyUpdate:
    await store.start_transfer(SwitchOptions())
    await store.update_transfer(WEIGHTS)
    return await store.finish_transfer(None)


def kinds(replica: TransferringReplica) -> list[type[Command]]:
    """The steps that reached it. That its weights are saved afterwards is no step."""
    return [type(command) for command in replica.received if not isinstance(command, SaveTransfer)]


async def gone_back(*replicas: TransferringReplica) -> None:
    """Returns once they have loaded version 0 again."""
    await until(lambda: all(kinds(replica)[-1] is Swap for replica in replicas))
    for replica in replicas:
        assert kinds(replica)[-3:] == BACK
        assert (replica.is_alive, replica.loaded) == (True, LoadedWeights(0))


def assert_refused(refused: pytest.ExceptionInfo[Exception], field: str, message: str) -> None:
    assert isinstance(refused.value, TransferRefused)
    assert [(problem.field, problem.message) for problem in refused.value.problems] == [(field, message)]
