"""`AsyncPolicyPusher`: pushes the weights after each training step, as a delta where that is smaller."""

import time
from typing import TYPE_CHECKING, Unpack

from rollout_client.calls.concurrency import async_call_blocking
from rollout_client.calls.options import CallOptions, call_options
from rollout_client.calls.policy import PusherOptions
from rollout_client.contract.policy import PushResult
from rollout_client.errors import RequestRejected, needed_for
from rollout_client.weights.sources import TensorsSource, full_weights

if TYPE_CHECKING:
    from rollout_client.calls.async_client.client import AsyncRolloutClient
    from rollout_client.weights.pushed_weights import CapturedWeights


class AsyncPolicyPusher:
    """Pushes a model repeatedly, through `client`.

        pusher = AsyncPolicyPusher(client)
        for step in range(steps):
            ...
            await pusher.push(model)

    After each push the service has exactly the pushed weights, bit for bit. A delta needs a copy of the weights that
    were pushed last; it is kept in host memory, in the service's dtypes. Full weights are sent at the first push,
    wherever a delta is not smaller, and where the service's current version is not the one pushed last (it has
    restarted, or another client has pushed). Only one push at a time.

    Args:
        is_verified: compute a checksum of each version here, and compare it with the service's.
        is_partial: push only what is trained, as `kind="partial"` does, in the place of full weights. The checksums of
            the service are of all weights, so nothing is verified here.

    Raises:
        ModuleNotFoundError: numpy is not installed; the message names the extra.
    """

    def __init__(self, client: "AsyncRolloutClient", *, is_verified: bool = True, is_partial: bool = False) -> None:
        self.client = client
        """The client of the service that gets the weights."""
        self._is_partial = is_partial
        with needed_for("PolicyPusher", "weights"):
            from rollout_client.weights.pushed_weights import PushedWeights
        self._pushed = PushedWeights(is_verified, is_partial)
        self.update: PushResult | None = None
        """The result of the last push; `None` before the first."""

    async def push(
        self, source: TensorsSource, version: int | None = None, **options: Unpack[PusherOptions]
    ) -> PushResult:
        """Returns once every replica serves the weights; `capture` and `send` are its two halves.

        Raises:
            WeightsDiffer: the service has other weights now; the next push sends full ones.
            WeightsDoNotFit: the tensors are not those of the service's model; nothing was sent.
            RolloutError: as `AsyncRolloutClient.push_weights` raises it.
        """
        began = time.perf_counter()
        captured = await self.capture(source, **call_options(options))
        update = await self.send(captured, version, **options)
        self.update = update.model_copy(update={"push_s": time.perf_counter() - began})
        return self.update

    async def capture(self, source: TensorsSource, **options: Unpack[CallOptions]) -> "CapturedWeights":
        """Copies what `send` will send. Reads `source` once, tensor by tensor; it may change once this returns.

        Raises:
            WeightsDoNotFit: the tensors are not those of the service's model.
        """
        self._pushed.check(await self.client.policy.state(**options))
        layout = await self.client.policy.layout(**options)
        weights = await async_call_blocking(full_weights, source, layout, self._is_partial)
        return await async_call_blocking(self._pushed.capture, weights)

    async def send(
        self, captured: "CapturedWeights", version: int | None = None, **options: Unpack[PusherOptions]
    ) -> PushResult:
        """Sends captured weights. The next training step may run at the same time."""
        try:
            update = await self.client.push_weights(
                captured.weights, version, kind=captured.kind, base=captured.base, checksum=captured.checksum, **options
            )
        except RequestRejected:
            self._pushed.forget()
            raise
        self._pushed.confirm(captured, update)
        self.update = update
        return update
