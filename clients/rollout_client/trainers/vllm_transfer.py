"""vLLM's weight transfer from a trainer straight into all engines of the service.

`RolloutWeightSyncClient` takes the place of the single engine that vLLM's trainer side expects.

    client = RolloutClient(url)
    transfer = RolloutWeightSyncClient(client)
    engine = NCCLTrainerWeightTransferEngine.trainer_init(
        NCCLTrainerInitInfo(address, port, client.policy.state().transfer_world_size, rank=0),
        client=transfer,
        source=ModuleSource(model),
    )
    for step in range(steps):
        ...
        engine.send_weights()
        transfer.update.version

The service's engines must be configured for the same backend (`engine: {weight_transfer_config: {backend: nccl}}`), and
its config must list the trainer's address (`policy: {transfer: {trainers: ["10.0.0.4:29500"]}}`).
The tests use `gloo`, a backend for CPUs, with the same calls as `nccl`; `nccl` itself is not tested.
"""

from typing import Any, TypeVar, Unpack

from rollout_client.calls.call import Call, call_for, nothing
from rollout_client.calls.json_values import json_bytes, json_value
from rollout_client.calls.policy import UpdateOptions, switch_query
from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.contract.policy import PolicyUpdate, TransferInit, TransferUpdate, TransferWorld
from rollout_client.errors import RequestRejected, RolloutError

Result = TypeVar("Result")
PATH = "/policy/transfer"
TIMEOUT_S = 900.0
"""Default limit of one step. vLLM's backends wait for each other as long; the service's own limit is shorter."""


class ConnectAgain(RolloutError):
    """The set of replicas has changed since the init, or the transfer failed: a new init must precede the next one."""


class RolloutWeightSyncClient:
    """Implements vLLM's protocol `VLLMWeightSyncClient`, without importing vLLM.

    Args:
        client: other threads may use it at the same time.
        timeout_s: limit of one step in seconds. An init lasts until every replica has connected to the trainer; a start
            lasts until other updates have ended.
        options: how the replicas change to the new weights.

    Every method raises a `RolloutError`: `ConnectAgain`, or `RequestRejected` where the service refuses the arguments,
    for example a wrong world size.
    """

    def __init__(
        self, client: RolloutClient, *, timeout_s: float | None = TIMEOUT_S, **options: Unpack[UpdateOptions]
    ) -> None:
        self.update: PolicyUpdate | None = None
        """The result of the last finished transfer: its version and the outcome on each replica."""
        self._client = client
        self._timeout_s = timeout_s
        self._options = options

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Returns once every replica has connected to the trainer, each with its own range of ranks."""
        body = json_bytes(TransferInit(init_info=json_value(dict(init_info), "init_info")))
        self._client.once(call_for(TransferWorld, "POST", f"{PATH}/init", body=body), self._timeout_s)

    def start_weight_update(self) -> None:
        """Pauses generation on every replica. The service abandons a transfer whose next step does not come in time."""
        self._step(Call("POST", f"{PATH}/start", nothing, query=switch_query(self._options)))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Returns once every replica has received the tensors that the trainer sends at the same time."""
        body = json_bytes(TransferUpdate(update_info=json_value(update_info, "update_info")))
        self._step(Call("POST", f"{PATH}/update", nothing, body=body))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Gives the transferred weights a version and resumes generation on every replica.

        Args:
            weight_version: the number of the version; by default one more than the newest.

        Raises:
            ValueError: `weight_version` is not a number.
        """
        version = None if weight_version is None else int(weight_version)
        self.update = self._step(call_for(PolicyUpdate, "POST", f"{PATH}/finish", query={"version": version}))

    def _step(self, call: Call[Result]) -> Result:
        try:
            return self._client.once(call, self._timeout_s)
        except RequestRejected as error:
            if not error.problem.type.endswith("transfer-refused"):
                raise
            raise ConnectAgain(
                f"{str(error).rstrip('.')}. Connect again: a new trainer_init, with "
                "world_size=client.policy.state().transfer_world_size."
            ) from error
