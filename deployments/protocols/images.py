"""Images of prompts: how they are named and kept, and what tokens a model writes for one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from rollout_client.contract.messages import MediaRange


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The tokens that stand for one image in a prompt of the model that is served."""

    placeholder: int
    """The token that the chat template writes for an image, in whose place `token_ids` come."""
    token_ids: Sequence[int]


ImagesByName = Mapping[str, ImageTokens]


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Tokens `[start, end)` of a prompt stand for the image of this name."""

    name: str
    start: int
    end: int


def name_of_image(data: bytes) -> str:
    """The name of an image: its content's, so that equal images are one."""
    return f"sha256:{sha256(data).hexdigest()}"


class OtherPlaceholders(Exception):
    """The rendering of a message has not one placeholder for each of its images."""


def expanded(
    token_ids: Sequence[int], names: Sequence[str], images: ImagesByName
) -> tuple[list[int], list[MediaRange]]:
    """The tokens of a message with those of its images, and which ones these are.

    Args:
        names: the message's images in order, all of which are known.

    Raises:
        OtherPlaceholders: the tokens have not one placeholder for each, or one although there are no names.
    """
    if not names:
        if not {image.placeholder for image in images.values()}.isdisjoint(token_ids):
            raise OtherPlaceholders("The tokens of an image stand where none is shown")
        return [*token_ids], []
    placeholder = images[names[0]].placeholder
    places = [place for place, token_id in enumerate(token_ids) if token_id == placeholder]
    if len(places) != len(names):
        raise OtherPlaceholders(f"The model's chat template writes {len(places)} images of {len(names)}")
    ids: list[int] = []
    ranges: list[MediaRange] = []
    before = 0
    for place, name in zip(places, names, strict=True):
        ids += token_ids[before:place]
        start, before = len(ids), place + 1
        ids += images[name].token_ids
        ranges.append(MediaRange.model_construct(media=name, start=start, end=len(ids)))
    ids += token_ids[before:]
    return ids, ranges


class ImageStore(Protocol):
    """Keeps images by name, for all processes of the service. `RemoteImages` implements it."""

    async def put(self, images: Sequence[bytes], owner: str | None = None) -> list[str]:
        """Keeps images, whose format and size were checked, and returns their names.

        Args:
            owner: the name of the key that may refer to them; `None` where the service has no keys.

        Raises:
            ImagesFull: the store, or the owner's part of it, has no room.
            ImagesLost: the store cannot be reached.
        """

    async def refused(self, names: Sequence[str], owner: str | None = None) -> list[str]:
        """Those of the names that the store does not have, or that this owner may not refer to. Others are kept for
        the whole time of an image from now on."""

    async def get(self, name: str) -> bytes:
        """The content of an image.

        Raises:
            ImageUnknown: there is none of this name any more.
            ImagesLost: the store cannot be reached.
        """


class _MessageWithImages(Protocol):
    """A message whose tokens are known, and which of them stand for images."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def mm_ranges(self) -> Sequence[MediaRange] | None: ...


def image_spans(messages: Iterable[_MessageWithImages], start: int = 0) -> tuple[ImageSpan, ...]:
    """The images of the messages, the first of which begins at token `start` of the prompt."""
    spans: list[ImageSpan] = []
    for message in messages:
        if message.mm_ranges:
            spans += (ImageSpan(shown.media, start + shown.start, start + shown.end) for shown in message.mm_ranges)
        start += len(message.token_ids)
    return tuple(spans)
