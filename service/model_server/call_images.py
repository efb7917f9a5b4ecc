"""Images in calls of OpenAI's and Anthropic's APIs: checked and kept here, so that replicas get their names alone.

Each API has a form of its own. Chat completions take that of our own messages too, `{"type": "image", "image": ...}`,
so that an agent can send the messages of its sample as they are.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deployments.protocols.model_server import Endpoint
from rollout_client.contract.base import FieldProblem
from service.access.keys import Caller
from service.images.request_images import Location, RequestImages, names_of
from service.problems import dotted, invalid_request, shown

_SOURCE = re.compile(r"sha256:[0-9a-f]{64}\Z|data:")
_NO_SOURCE = (
    "it is not an image that the service takes here: send a data URL, or the name of an image that was uploaded, "
    "sha256: and its hash"
)
_NOT_SHOWN = "a message of this role shows no images; show it in a message of role 'user'"
_IMAGE_TYPES = ("image", "image_url", "input_image")


@dataclass(frozen=True, slots=True)
class _ShownImage:
    """An image in the body of a call."""

    source: str
    place: Location
    parts: list[Any]
    """The parts among which it stands."""
    number: int
    """Its index there."""


def _named_part(endpoint: Endpoint, name: str) -> dict[str, Any]:
    """The part that names an image, in the form of the endpoint's API."""
    if endpoint == "responses":
        return {"type": "input_image", "image_url": name, "detail": "auto"}
    if endpoint in ("messages", "messages/count_tokens"):
        # vLLM makes an `image_url` of an image that is named by an address.
        return {"type": "image", "source": {"type": "url", "url": name}}
    return {"type": "image_url", "image_url": {"url": name}}


async def with_names_of_images(
    endpoint: Endpoint, body: bytes, fields: dict[str, Any], images: RequestImages | None, caller: Caller
) -> bytes:
    """The body with each image by its name: the very body if it shows none.

    Args:
        fields: the parsed body.
        images: `None` for a service that takes none.

    Raises:
        RequestProblem: 422, an image cannot be taken. Nothing was kept.
        ImagesFull, ImagesLost: they could not be kept.
    """
    shown_images = _images_of(fields)
    if not shown_images:
        return body
    names = await names_of(images, [(image.source, image.place) for image in shown_images], caller)
    for image in shown_images:
        image.parts[image.number] = _named_part(endpoint, names.get(image.source, image.source))
    return json.dumps(fields, separators=(",", ":")).encode()


def _images_of(fields: dict[str, Any]) -> list[_ShownImage]:
    """The images in the parsed body of a call.

    Raises:
        RequestProblem: 422, a part is an image that is not one, or stands where none is shown.
    """
    found: list[_ShownImage] = []
    for parts, place, can_show in _lists_of_parts(fields):
        for number, part in enumerate(parts):
            if not isinstance(part, dict) or not _is_image(part):
                continue
            source, location = _source_of(part), (*place, number)
            if not can_show:
                raise invalid_request(FieldProblem(field=dotted(location), message=_NOT_SHOWN))
            if source is None or _SOURCE.match(source) is None:
                raise invalid_request(FieldProblem(field=dotted(location), message=_NO_SOURCE, value=shown(source)))
            found.append(_ShownImage(source, location, parts, number))
    return found


def _lists_of_parts(fields: dict[str, Any]) -> Iterator[tuple[list[Any], Location, bool]]:
    """Yields each list in which parts may stand by any of the APIs, its place, and whether it can show images."""
    yield _listed(fields, "system"), ("system",), False
    for field in ("input", "messages"):
        for number, message in enumerate(_listed(fields, field)):
            can_show = isinstance(message, dict) and message.get("role") == "user"
            content = _listed(message, "content")
            yield content, (field, number, "content"), can_show
            yield _listed(message, "output"), (field, number, "output"), False
            for place, block in enumerate(content):
                yield _listed(block, "content"), (field, number, "content", place, "content"), can_show


def _listed(holder: Any, field: str) -> list[Any]:
    value = holder.get(field) if isinstance(holder, dict) else None
    return value if isinstance(value, list) else []


def _is_image(part: dict[str, Any]) -> bool:
    return part.get("type") in _IMAGE_TYPES or "image_url" in part


def _source_of(part: dict[str, Any]) -> str | None:
    """The image as a data URL, address or name; `None` for what is none of them, or something else besides."""
    if part.get("type") not in (*_IMAGE_TYPES, None):
        return None
    match part:
        case {"image_url": {"url": str(url)}} | {"image_url": str(url)} | {"type": "image", "image": str(url)}:
            return url
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return url
        case {"type": "image", "source": {"type": "base64", "data": str(data), **source}}:
            return f"data:{source.get('media_type', 'image/jpeg')};base64,{data}"
    return None
