"""For vLLM's weight transfer: the service in the place of the one engine that a trainer's side believes in.

    client = RolloutClient(url)
    transfer = RolloutWeightSyncClient(client)
    engine = NCCLTrainerWeightTransferEngine.trainer_init(
        NCCLTrainerInitInfo(address, port, client.policy().transfer_world_size, rank=0),
        client=transfer,
        source=ModuleSource(model),
    )
    for step in range(steps):
        ...
        engine.send_weights()
        transfer.update.version

The service's engines must be configured for the same backend (`engine: {weight_transfer_config: {backend: nccl}}`).
Tested with the service's own backend for processors, `gloo`; the steps of `nccl` are the same, and it has not run here
for want of a GPU.
"""

from typing import Any, TypeVar, Unpack

from rollout_client.client import RolloutClient
from rollout_client.errors import RequestRejected, RolloutError
from rollout_client.policy_calls import (
    UpdateOptions,
    finish_transfer_call,
    init_transfer_call,
    start_transfer_call,
    update_transfer_call,
)
from rollout_client.policy_contract import PolicyUpdate
from rollout_client.rollout_calls import Call

Answer = TypeVar("Answer")
TIMEOUT_S = 900.0
"""Of one step. It is the longest that vLLM's backends wait for one another, and more than the service's own."""


class ConnectAgain(RolloutError):
    """The replicas are not those that met the trainer, or the transfer broke: nothing can be sent before a new init."""


class RolloutWeightSyncClient:
    """Implements vLLM's `VLLMWeightSyncClient` protocol.

    Args:
        client: may be used by other threads meanwhile.
        timeout_s: what one step may take, in seconds. An init takes until every replica has met the trainer, a start
            until other updates have ended.
        options: how the new weights take the place of the old ones.

    Every method raises a `RolloutError`: `ConnectAgain`, or `RequestRejected` where the service wants something else,
    such as another world size.
    """

    def __init__(
        self, client: RolloutClient, *, timeout_s: float | None = TIMEOUT_S, **options: Unpack[UpdateOptions]
    ) -> None:
        self.update: PolicyUpdate | None = None
        """What the last finished transfer became: its version, and how each replica took it."""
        self._client = client
        self._timeout_s = timeout_s
        self._options = options

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Returns once every replica has met the trainer, each at ranks of its own after `rank_offset`."""
        self._client.once(init_transfer_call(init_info), self._timeout_s)

    def start_weight_update(self) -> None:
        """Pauses every replica; whoever is silent for long afterwards is given up."""
        self._step(start_transfer_call(self._options))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Returns once every replica has received what the trainer sends meanwhile."""
        self._step(update_transfer_call(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """What was sent is the version of that number, by default the next; every replica goes on with it.

        Raises:
            ValueError: `weight_version` is no number.
        """
        version = None if weight_version is None else int(weight_version)
        self.update = self._step(finish_transfer_call(version))

    def _step(self, call: Call[Answer]) -> Answer:
        try:
            return self._client.once(call, self._timeout_s)
        except RequestRejected as error:
            if not error.problem.type.endswith("transfer-refused"):
                raise
            raise ConnectAgain(
                f"{error}. Connect again: a new trainer_init, with world_size=client.policy().transfer_world_size."
            ) from error
