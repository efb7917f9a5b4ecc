"""The contract of `/blobs`: images that are uploaded once, and named in messages.

The name of an image is that of its content, so that equal images have one name. Only the key that has uploaded an
image may name it; where the service asks for no keys, everybody may.
"""

from typing import Annotated

from pydantic import Field

from rollout_client.contract.base import Lenient
from rollout_client.contract.messages import IMAGE_NAME

ImageName = Annotated[str, Field(pattern=IMAGE_NAME)]


class BlobInfo(Lenient):
    """An image that the service keeps."""

    name: ImageName
    """`sha256:` and the hash of its content, for a part of a message: `{"type": "image", "image": name}`."""
    bytes: int = Field(ge=0)
    """Size of the file."""
    media_type: str
    """`image/png` or `image/jpeg`, by its content."""
    width: int = Field(ge=1)
    """In pixels."""
    height: int = Field(ge=1)
    """In pixels."""
