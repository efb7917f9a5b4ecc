"""What a trainer calls after each step: the weights go to the service as what changed, where that is smaller."""

from typing import TYPE_CHECKING, Unpack

from rollout_client.concurrency import async_call_blocking
from rollout_client.errors import RequestRejected
from rollout_client.optional_dependencies import needed_for
from rollout_client.policy_calls import UpdateOptions
from rollout_client.policy_contract import PolicyUpdate
from rollout_client.weights.sources import TensorsSource, full_weights

if TYPE_CHECKING:
    from rollout_client.async_client.client import AsyncRolloutClient
    from rollout_client.weights.mirror import CapturedWeights, Mirror


class AsyncPolicyPusher:
    """Pushes a model again and again, through `client`.

        pusher = AsyncPolicyPusher(client)
        for step in range(steps):
            ...
            await pusher.push(model)

    Keeps a copy of what it pushed last in host memory, in the service's dtypes. The first push brings full weights, and
    so does each one after which the service has something else: it was restarted, or somebody else pushed. Bit for bit,
    the service has what was pushed. One push at a time.

    Args:
        is_verified: whether the service's checksum of each version is compared with one made here.

    Raises:
        ModuleNotFoundError: numpy is missing; the message says what to install.
    """

    def __init__(self, client: "AsyncRolloutClient", *, is_verified: bool = True) -> None:
        self._client = client
        self._mirror = new_mirror(is_verified)

    async def push(
        self,
        source: TensorsSource,
        version: int | None = None,
        *,
        progress: bool = False,
        **options: Unpack[UpdateOptions],
    ) -> PolicyUpdate:
        """Returns once every replica serves the weights. Raises what `RolloutClient.push_weights` raises, and
        `WeightsDiffer` where the service ends up with other weights.
        """
        return await self.send(await self.take(source), version, progress=progress, **options)

    async def take(self, source: TensorsSource) -> "CapturedWeights":
        """The first half of `push`: once it returns, `source` may change. It is read once, tensor by tensor.

        Raises:
            WeightsDoNotFit: these are not weights of the model that the service serves.
        """
        self._mirror.check(await self._client.policy(checksums_within_s=0))
        weights = await async_call_blocking(full_weights, source, await self._client.policy_layout())
        return await async_call_blocking(self._mirror.take, weights)

    async def send(
        self,
        taken: "CapturedWeights",
        version: int | None = None,
        *,
        progress: bool = False,
        **options: Unpack[UpdateOptions],
    ) -> PolicyUpdate:
        """The second half of `push`; it may run beside the next step of the training."""
        try:
            update = await self._client.push_weights(
                taken.weights, version, kind=taken.kind, base=taken.base, progress=progress, **options
            )
        except RequestRejected:
            self._mirror.forget()
            raise
        self._mirror.confirm(taken, update)
        return update


def new_mirror(is_verified: bool) -> "Mirror":
    with needed_for("Pushing what changed", "weights"):
        from rollout_client.weights.mirror import Mirror
    return Mirror(is_verified)
