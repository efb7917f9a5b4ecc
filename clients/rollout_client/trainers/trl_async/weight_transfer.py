"""`ServiceWeightTransfer`: TRL's `WeightTransferProtocol`, by pushes of what changed over HTTP."""

from collections.abc import Iterator

import torch
from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol

from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.calls.sync_client.pusher import PolicyPusher


class ServiceWeightTransfer(WeightTransferProtocol):
    """Pushes the trainer's weights to the service, which pauses and resumes its engines itself.

    TRL sends no frozen parameters: the service has them.
    """

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._pusher: PolicyPusher | None = None
        self.version: int | None = None
        """The service's version of the weights that were sent last; `None` before the first."""

    def init_weight_transfer(self) -> None:
        self._client.wait_until_ready()

    def pause(self) -> None:
        """Does nothing: a push pauses each replica only while it swaps its weights."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Returns once every replica serves the weights. Keeps a copy of them in host memory, and needs another one."""
        tensors = {name: tensor.cpu() for name, tensor in iterator}
        if self._pusher is None:
            is_partial = not self._client.policy_layout().tensors.keys() <= tensors.keys()
            self._pusher = PolicyPusher(self._client, is_partial=is_partial)
        self.version = self._pusher.push(tensors).version

    def resume(self) -> None:
        """Does nothing: see `pause`."""

    def destroy(self) -> None:
        """Does nothing: the caller owns the client."""
