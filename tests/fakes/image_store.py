"""The image store in one process."""

from collections.abc import Callable, Sequence

from deployments.images.book import ImagesSettings
from deployments.images.store import ImagesReplica
from deployments.protocols.images import ImageStore, name_of_image
from tests.fakes.storage import ScriptedStorage


class ImagesInProcess(ImageStore):
    """The real image store, called without Serve; its objects are the contents themselves."""

    def __init__(
        self,
        settings: ImagesSettings | None = None,
        storage: ScriptedStorage | None = None,
        time_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.replica = ImagesReplica(
            settings or ImagesSettings(), storage or ScriptedStorage(), time_s, share=lambda content: content
        )
        self.puts: list[list[str]] = []
        """The names of each call of `put`."""
        self.read: list[str] = []
        self.kept: dict[str, bytes] = {}
        """Everything that was ever put."""

    async def put(self, images: Sequence[bytes], owner: str | None = None) -> list[str]:
        names = [name_of_image(data) for data in images]
        await self.replica.put(dict(zip(names, images, strict=True)), owner or "")
        self.puts.append(names)
        self.kept.update(zip(names, images, strict=True))
        return names

    async def refused(self, names: Sequence[str], owner: str | None = None) -> list[str]:
        return await self.replica.refused(names, owner or "")

    async def get(self, name: str) -> bytes:
        self.read.append(name)
        [content] = await self.replica.reference(name)
        assert isinstance(content, bytes)
        return content
