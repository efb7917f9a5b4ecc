"""Images in calls of vLLM's serving layers, which know them by their names alone.

The ingress has put `sha256:` and a hash in the place of each image (`service/model_server/call_images.py`). vLLM would
fetch what it finds there, and expand its placeholder in each prompt anew: it parses marks in the place of images, and
gets a prompt whose images are expanded.
"""

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import has_non_text_content

from rollout_client.contract.messages import IMAGE_NAME

MARK = f"image-{secrets.token_hex(16)}-"
"""Begins the text that stands for an image while vLLM parses the messages. No caller knows it."""
NAME = re.compile(IMAGE_NAME)


def with_marks(messages: list[Any]) -> tuple[list[Any], bool]:
    """The messages with marks in the place of images; and whether they show any.

    Raises:
        VLLMValidationError: a part is neither a text nor the name of an image.
    """
    marked = [_message_with_marks(message) for message in messages]
    if has_non_text_content(marked):
        raise VLLMValidationError(
            "A message has a part that is neither a text nor an image: leave it out.", parameter="messages"
        )
    texts = (part.get("text") for message in marked for part in _parts_of(message) if isinstance(part, Mapping))
    return marked, any(isinstance(text, str) and text.startswith(MARK) for text in texts)


def _message_with_marks(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    content = message.get("content")
    # vLLM's requests have iterators, which give their parts once.
    if content is None or isinstance(content, str) or not isinstance(content, Iterable):
        return message
    return {**message, "content": [_marked_part(part) for part in content]}


def _parts_of(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else ()


def _marked_part(part: Any) -> Any:
    given = part.get("image_url") if isinstance(part, Mapping) else None
    name = given.get("url") if isinstance(given, Mapping) else given
    return {"type": "text", "text": MARK + name} if isinstance(name, str) and NAME.match(name) else part


def with_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message that vLLM has parsed, with the names of images in the place of their marks.

    Raises:
        VLLMValidationError: vLLM made texts of the parts, as it does with those of a tool's result.
    """
    content = message.get("content")
    if isinstance(content, str) and MARK in content:
        shown = f"A message of role {message.get('role')!r} shows no images"
        raise VLLMValidationError(f"{shown}: show them in one of role 'user'.", parameter="messages")
    if not isinstance(content, list):
        return {**message}
    return {**message, "content": [_named_part(part) for part in content]}


def _named_part(part: Any) -> Any:
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str) or not text.startswith(MARK):
        return part
    return {"type": "image", "image": text.removeprefix(MARK)}
