"""Images in tokenized messages: the tokens of each image, in the place of the one that the chat template writes for it.

A placeholder is expanded once, when its message is tokenized. From then on the log has the tokens of the image, and
later turns send them as they are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from deployments.protocols.chat import TokenizedObservation
from deployments.protocols.images import ImagesByName
from rollout_client.contract.messages import MediaRange

Expanded = tuple[list[int], list[MediaRange]]


class OtherPlaceholders(Exception):
    """The rendering of a message has not one placeholder for each of its images."""


def expanded(token_ids: Sequence[int], names: Sequence[str], images: ImagesByName) -> Expanded:
    """The tokens of a message with those of its images, and which ones these are.

    Args:
        names: the message's images in order, all of which are known.

    Raises:
        OtherPlaceholders: the tokens have not one placeholder for each.
    """
    if not names:
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


def with_images(message: TokenizedObservation, names: Sequence[str], images: ImagesByName) -> TokenizedObservation:
    """The message with the tokens of its images. One that was cut may show the first of them alone.

    Raises `OtherPlaceholders` if the template writes more images or fewer.
    """
    if message.was_cut:
        placeholders = {images[name].placeholder for name in names}
        names = names[: sum(token_id in placeholders for token_id in message.token_ids)]
    token_ids, mm_ranges = expanded(message.token_ids, names, images)
    return replace(message, token_ids=token_ids, mm_ranges=mm_ranges)


def tokens_that_fit(
    observed: Sequence[TokenizedObservation], names: Sequence[Sequence[str]], images: ImagesByName, room: int
) -> int:
    """How many tokens of the messages, of which each image is still one, have room with those of their images.

    An image has room as a whole or not at all.
    """
    fitting = 0
    for message, shown in zip(observed, names, strict=False):
        for cost in _costs(message.token_ids, shown, images):
            if cost > room:
                return fitting
            room -= cost
            fitting += 1
    return fitting


def _costs(token_ids: Sequence[int], names: Sequence[str], images: ImagesByName) -> Iterator[int]:
    """How many tokens stand in the end in the place of each."""
    sizes = (len(images[name].token_ids) for name in names)
    placeholder = images[names[0]].placeholder if names else None
    for token_id in token_ids:
        yield next(sizes, 1) if token_id == placeholder else 1
