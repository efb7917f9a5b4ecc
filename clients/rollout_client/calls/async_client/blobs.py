"""The methods of the client for images."""

from os import PathLike
from pathlib import Path
from typing import Unpack

from rollout_client.calls.async_client.connection import AsyncConnection
from rollout_client.calls.blobs import image_call, upload_call
from rollout_client.calls.concurrency import async_call_blocking
from rollout_client.calls.options import CallOptions


class AsyncBlobMethods:
    """The methods of a client for images of messages."""

    _connection: AsyncConnection

    async def upload_image(self, image: bytes | str | PathLike[str], **options: Unpack[CallOptions]) -> str:
        """Uploads a PNG, JPEG or WebP image, and returns its name for messages.

        A part `{"type": "image", "image": name}` of a message shows it. Uploaded again it has the same name.

        Args:
            image: the content of the file, or its path.
        """
        content = image if isinstance(image, bytes) else await async_call_blocking(Path(image).read_bytes)
        return await self._connection.short(upload_call(content), options)

    async def image(self, name: str, **options: Unpack[CallOptions]) -> bytes:
        """The file of an image, by the name that `upload_image`, a message or `mm_ranges` has."""
        return await self._connection.short(image_call(name), options)
