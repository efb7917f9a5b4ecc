"""The image store over its Serve handle, for ingress, generator and environment replicas."""

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from deployments.failures import ImagesLost
from deployments.protocols.images import ImageStore, name_of_image
from deployments.rpc.batching import BYTES_PER_RECORD, divided
from deployments.rpc.handle_calls import call_result
from deployments.storage.storage import attempts

WHO = "The image store"


class RemoteImages(ImageStore):
    """Each call waits up to `AWAY_S` seconds for a store that has died, then raises `ImagesLost`.

    Raises `StorageFailed` too, if the store's database fails.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        # Through Ray, which counts the reference that comes back. Over gRPC it would be pinned for ever.
        self._counted = handle.options(_by_reference=True)

    async def put(self, images: Sequence[bytes], owner: str | None = None) -> list[str]:
        names = await asyncio.to_thread(lambda: [name_of_image(data) for data in images])
        contents = dict(zip(names, images, strict=True))
        for part in divided(list(contents.items()), lambda item: BYTES_PER_RECORD + len(item[1])):
            await attempts(ImagesLost)(self._call, "put", dict(part), owner or "")
        return names

    async def refused(self, names: Sequence[str], owner: str | None = None) -> list[str]:
        refused: list[str] = await attempts(ImagesLost)(self._call, "refused", list(names), owner or "")
        return refused

    async def get(self, name: str) -> bytes:
        data: bytes = await attempts(ImagesLost)(self._get, name)
        return data

    async def answer(self) -> None:
        """Returns if the store reads and writes; does not wait for one that has died."""
        await self._call("answer")

    async def _call(self, method: str, *arguments: Any) -> Any:
        response: Any = getattr(self._handle, method).remote(*arguments)
        return await call_result(response, response, ImagesLost, WHO)

    async def _get(self, name: str) -> bytes:
        response: Any = self._counted.reference.remote(name)
        [reference] = await call_result(response, response, ImagesLost, WHO)
        try:
            data: bytes = await reference
        except RayError as error:
            # The store that made the object has died with it; the next one makes another.
            raise ImagesLost(f"{WHO} died before an image could be read.") from error
        return data
