"""The image store over its Serve handle, for ingress, generator and environment replicas."""

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from deployments.failures import ImagesLost
from deployments.protocols.images import ImageStore, name_of_image
from deployments.rpc.batching import BYTES_PER_RECORD, divided
from deployments.rpc.handle_calls import StoreClient
from deployments.storage.storage import StoreReplaced, attempts

WHO = "The image store"


class RemoteImages(ImageStore):
    """Each call waits up to `AWAY_S` seconds for a store that has died, then raises `ImagesLost`.

    Raises `StorageFailed` too, if the store's database fails.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._store = StoreClient(handle, ImagesLost, WHO)
        # Through Ray, which counts the reference that comes back. Over gRPC it would be pinned for ever.
        self._counted = StoreClient(handle.options(_by_reference=True), ImagesLost, WHO)

    async def put(self, images: Sequence[bytes], owner: str | None = None) -> list[str]:
        names = await asyncio.to_thread(lambda: [name_of_image(data) for data in images])
        contents = dict(zip(names, images, strict=True))
        for part in divided(list(contents.items()), lambda item: BYTES_PER_RECORD + len(item[1])):
            await attempts((ImagesLost, StoreReplaced))(self._store.put, dict(part), owner or "")
        return names

    async def refused(self, names: Sequence[str], owner: str | None = None) -> list[str]:
        refused: list[str] = await attempts((ImagesLost, StoreReplaced))(self._store.refused, list(names), owner or "")
        return refused

    async def get(self, name: str) -> bytes:
        data: bytes = await attempts((ImagesLost, StoreReplaced))(self._get, name)
        return data

    async def answer(self) -> None:
        """Returns if the store reads and writes; does not wait for one that has died."""
        await self._store.answer()

    async def _get(self, name: str) -> bytes:
        [reference] = await self._counted.reference(name)
        try:
            data: bytes = await reference
        except RayError as error:
            # The store that made the object has died with it; the next one makes another.
            raise ImagesLost(f"{WHO} died before an image could be read.") from error
        return data
