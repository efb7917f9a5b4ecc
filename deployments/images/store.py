"""The image store, one for the service: the Serve deployment that `RemoteImages` calls.

Which images are kept, whose they are and what goes is in `ImageBook`; what a failing database does, in `StoredState`.
The content of each image is an object in Ray's memory, made when it is first wanted after a start: readers fetch it
from there, once a node, and it does not pass through this process again.

Guarantee: what `put` returns for is stored. A store that starts again has it.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import ray
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from deployments.failures import ImagesLost
from deployments.images.book import CONTENT, ImageBook, ImagesSettings, ImageUnknown
from deployments.protocols.images import ImageStore, name_of_image
from deployments.rpc.background_tasks import SharedCalls
from deployments.rpc.batching import BYTES_PER_RECORD, divided
from deployments.rpc.handle_calls import StoreClient
from deployments.storage.storage import Storage, StoredRecord, StoreReplaced, attempts
from deployments.storage.stored_state import Planned, StoreReplica


class ImagesReplica(StoreReplica[ImageBook]):
    """The image store. Owners are names of keys; the empty one is that of all callers where nobody needs a key.

    Args:
        time_s: seconds since 1970.
        share: makes an object of a content, to which other processes can refer.
    """

    def __init__(
        self,
        settings: ImagesSettings,
        storage: Storage | None = None,
        time_s: Callable[[], float] = time.time,
        share: Callable[[bytes], Any] = ray.put,
    ) -> None:
        super().__init__(settings, storage, "image")
        self._settings = settings
        self._time_s = time_s
        self._share = share
        self._shared: dict[str, Any] = {}
        """By name. Each object lives as long as this refers to it, or a reader does."""
        self._sharing = SharedCalls(self._shared_now)

    async def put(self, images: Mapping[str, bytes], owner: str) -> None:
        """Keeps images, by their names, for an owner too. Doing it again changes nothing but the time.

        Raises:
            ImagesFull: there is no room, even without the images that may go.
        """
        for name in await self._state.change(lambda book: book.put(images, owner, self._time_s())):
            self._shared.pop(name, None)

    async def refused(self, names: Sequence[str], owner: str) -> list[str]:
        """Those that are not kept, or not for this owner, each once. The others are used now."""

        def plan(book: ImageBook) -> Planned[list[str]]:
            # In turn with what is stored: what goes at this moment is refused.
            def commit() -> list[str]:
                refused = book.refused(names, owner)
                book.use(set(names).difference(refused), self._time_s())
                return refused

            return [], commit

        return await self._state.change(plan)

    async def reference(self, name: str) -> list[Any]:
        """The reference to an image's content in Ray's memory, alone in a list: Ray resolves bare ones itself.

        Raises:
            ImageUnknown: it is not kept any more.
        """
        book = await self._state.started()
        if name not in book:
            raise ImageUnknown.named(name)
        book.use([name], self._time_s())
        return [self._shared[name] if name in self._shared else await self._sharing.result(name)]

    async def pass_time(self) -> None:
        """Nothing follows from the time alone."""
        await self._state.started()

    def _load(self, kept: Sequence[StoredRecord]) -> ImageBook:
        return ImageBook(self._settings, kept, self._time_s())

    async def _shared_now(self, name: str) -> Any:
        entries = await self._state.read(name, [CONTENT])
        if CONTENT not in entries:
            raise ImageUnknown.named(name)
        shared = await asyncio.to_thread(self._share, entries[CONTENT])
        if name in await self._state.started():
            self._shared[name] = shared
        return shared


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
        return cast(bytes, await attempts((ImagesLost, StoreReplaced))(self._get, name))

    async def answer(self) -> None:
        """Returns if the store reads and writes; does not wait for one that has died."""
        await self._store.answer()

    async def _get(self, name: str) -> bytes:
        [reference] = await self._counted.reference(name)
        try:
            return cast(bytes, await reference)
        except RayError as error:
            # The store that made the object has died with it; the next one makes another.
            raise ImagesLost(f"{WHO} died before an image could be read.") from error
