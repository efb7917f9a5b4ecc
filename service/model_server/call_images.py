"""Images in calls of OpenAI's and Anthropic's APIs: checked and kept here, so that replicas get their names alone.

Each API has a form of its own. Chat completions take that of our own messages too, `{"type": "image", "image": ...}`,
so that an agent can send the messages of its sample as they are.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from deployments.protocols.model_server import Endpoint
from rollout_client.contract.problems import FieldProblem
from service.access.keys import Caller
from service.images.request_images import Location, RequestImages, none_taken
from service.problems import MOST_PROBLEMS, dotted, invalid_request, shown

SOURCE = re.compile(r"sha256:[0-9a-f]{64}\Z|data:")
NO_SOURCE = (
    "it is not an image that the service takes here: send a data URL, or the name of an image that was uploaded, "
    "sha256: and its hash"
)
NOT_SHOWN = "a message of this role shows no images; show it in a message of role 'user'"
_IMAGE_TYPES = ("image", "image_url", "input_image")
_SHOWING_ROLES = ("user", "system", "developer")
_ANTHROPIC_ROLES = ("user",)


@dataclass(frozen=True, slots=True)
class _ShownImage:
    """An image in the body of a call."""

    source: str
    place: Location
    put: Callable[[str], None]
    """Writes its name into the parsed body."""


def _openai_part(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": name}}


def _responses_part(name: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": name, "detail": "auto"}


def _anthropic_block(name: str) -> dict[str, Any]:
    # vLLM makes an `image_url` of an image that is named by an address.
    return {"type": "image", "source": {"type": "url", "url": name}}


async def with_names_of_images(
    endpoint: Endpoint, body: bytes, fields: dict[str, Any], images: RequestImages | None, caller: Caller
) -> bytes:
    """The body with each image by its name: the very body if it shows none.

    Args:
        fields: the parsed body.
        images: `None` for a service that takes none.

    Raises:
        RequestProblem: 422 with the first `MOST_PROBLEMS` images that cannot be taken. Nothing was kept.
        ImagesFull, ImagesLost: they could not be kept.
    """
    shown_images = images_of(endpoint, fields)
    if not shown_images:
        return body
    sources = [(image.source, image.place) for image in shown_images]
    if images is None:
        raise none_taken(sources)
    if len(sources) > images.settings.max_images:
        message = f"it shows {len(sources)} images, and images.max_images allows {images.settings.max_images}"
        raise invalid_request(FieldProblem(field="body", message=f"{message}; show fewer", value=len(sources)))
    names = await images.names_of(sources, caller)
    for image in shown_images:
        image.put(names.get(image.source, image.source))
    return json.dumps(fields, separators=(",", ":")).encode()


def images_of(endpoint: Endpoint, fields: dict[str, Any]) -> list[_ShownImage]:
    """The images in the parsed body of a call.

    Raises:
        RequestProblem: 422, a part is an image that is not one, or stands where none is shown.
    """
    found: list[_ShownImage] = []
    problems: list[FieldProblem] = []
    for part, place, put, can_show in _image_parts(endpoint, fields):
        source = _source_of(part)
        if not can_show:
            problems.append(FieldProblem(field=dotted(place), message=NOT_SHOWN))
        elif source is None or SOURCE.match(source) is None:
            problems.append(FieldProblem(field=dotted(place), message=NO_SOURCE, value=shown(source)))
        else:
            found.append(_ShownImage(source, place, put))
    if problems:
        raise invalid_request(*problems[:MOST_PROBLEMS])
    return found


_Part = tuple[dict[str, Any], Location, Callable[[str], None], bool]
"""An image part, its place, what puts a name in its place, and whether its message can show images."""


def _image_parts(endpoint: Endpoint, fields: dict[str, Any]) -> Iterator[_Part]:
    match endpoint:
        case "chat/completions" | "tokenize":
            yield from _in_messages("messages", fields, _openai_part)
        case "responses":
            yield from _in_messages("input", fields, _responses_part)
            for number, item in enumerate(_listed(fields, "input")):
                yield from _in_parts(_listed(item, "output"), ("input", number, "output"), _responses_part, False)
        case "messages" | "messages/count_tokens":
            yield from _in_parts(_listed(fields, "system"), ("system",), _anthropic_block, False)
            yield from _in_messages("messages", fields, _anthropic_block, _ANTHROPIC_ROLES)
            for number, message in enumerate(_listed(fields, "messages")):
                can_show = isinstance(message, dict) and message.get("role") in _ANTHROPIC_ROLES
                for place, block in enumerate(_listed(message, "content")):
                    location = ("messages", number, "content", place, "content")
                    yield from _in_parts(_listed(block, "content"), location, _anthropic_block, can_show)


def _in_messages(
    field: str, fields: dict[str, Any], named: Callable[[str], dict[str, Any]], roles: Sequence[str] = _SHOWING_ROLES
) -> Iterator[_Part]:
    for number, message in enumerate(_listed(fields, field)):
        can_show = isinstance(message, dict) and message.get("role") in roles
        yield from _in_parts(_listed(message, "content"), (field, number, "content"), named, can_show)


def _in_parts(
    parts: list[Any], place: Location, named: Callable[[str], dict[str, Any]], can_show: bool
) -> Iterator[_Part]:
    for number, part in enumerate(parts):
        if isinstance(part, dict) and _is_image(part):
            yield part, (*place, number), partial(_put_name, parts, number, named), can_show


def _put_name(parts: list[Any], number: int, named: Callable[[str], dict[str, Any]], name: str) -> None:
    parts[number] = named(name)


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
