"""vLLM's renderer, which puts a session's own ids in the place of rendered text, and prompts with images in theirs.

The ingress has put `sha256:` and a hash in the place of each image (`service/model_server/call_images.py`). vLLM would
fetch what it finds there, and expand its placeholder in each prompt again: it parses marks in the place of images, and
gets a prompt whose images are expanded.
"""

import asyncio
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import has_non_text_content, parse_chat_messages_async
from vllm.renderers.hf import resolve_chat_template, resolve_chat_template_content_format
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.renderers.params import ChatParams, merge_kwargs

from deployments.generation.engine import VLLMEngine
from deployments.generation.serving.served_call import CURRENT_CALL, answered_failures
from deployments.generation.serving.session_call import images_by_name
from deployments.generation.serving.template_renderer import TemplateRenderer
from deployments.protocols.images import ImageSpan
from deployments.sessions.message_comparison import plain_message
from deployments.sessions.records import NO_PLAN, ChatContext, new_images, prepared_prompt
from deployments.upstream.vllm.request_validation import with_known_roles
from rollout_client.contract.messages import IMAGE_NAME

_MARK = f"image-{secrets.token_hex(16)}-"
"""Begins the text that stands for an image while vLLM parses the messages. No caller knows it."""
IMAGE_NAMES = re.compile(IMAGE_NAME)
_REFUSED = ("truncate_prompt_tokens", "echo", "kv_transfer_params", "chat_template", "continue_final_message")
"""Fields with which a prompt would not be the session's own ids."""


class SessionOnlineRenderer(OnlineRenderer):
    """Chat, responses, messages and tokenizing all come through `preprocess_chat`."""

    engine: VLLMEngine | None = None
    """`None` for one that takes no images."""
    template: TemplateRenderer
    """Beside an engine that takes images."""

    async def preprocess_chat(
        self,
        request: Any,
        messages: list[Any],
        default_template: str | None,
        default_template_content_format: Any,
        default_template_kwargs: dict[str, Any] | None,
        tool_dicts: list[dict[str, Any]] | None = None,
        parser: Any = None,
        *,
        skip_mm_cache: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        call = CURRENT_CALL.get()
        session = call.session if call.is_generated else None
        shows_images = False
        if self.engine is not None:
            messages, shows_images = _with_marks(messages)
        conversation: list[Any] | None = None
        ids: Sequence[int] = ()
        images: Sequence[ImageSpan] = ()
        may_constrain = True
        if session is not None or shows_images:
            _refuse_other_prompts(request, "A call with images" if session is None else "A session")
            params = request.build_chat_params(default_template, default_template_content_format).with_defaults(
                merge_kwargs(default_template_kwargs, {"tools": tool_dicts, "tokenize": False})
            )
            with _too_deep_messages_refused():
                conversation, multi_modal = await self._parsed(messages, params, shows_images)
            if multi_modal:
                raise VLLMValidationError("A session takes text alone, no images or sounds.", parameter="messages")
            context = _context_of(tool_dicts, params.chat_template_kwargs)
            with answered_failures():
                if session is not None:
                    may_constrain = _asks_for_grammar(request)
                    ids = await session.prepare(conversation, context)
                    images = session.images
                elif self.engine is not None:
                    shown = await images_by_name(new_images(NO_PLAN, conversation), self.engine.image_tokens)
                    make = partial(prepared_prompt, NO_PLAN, conversation, context, self.template, shown)
                    prompt = await asyncio.to_thread(make)
                    ids, images = prompt.token_ids, prompt.images
            # vLLM's own door for prompts that were tokenized elsewhere: it takes them out of the request again.
            request.kv_transfer_params = {"prompt_token_ids": list(ids)}
        given = (request, messages, default_template, default_template_content_format, default_template_kwargs)
        with _too_deep_messages_refused():
            rendered, inputs = await super().preprocess_chat(*given, tool_dicts, parser, skip_mm_cache=skip_mm_cache)
        if images and self.engine is not None:
            with answered_failures():
                inputs = [await self.engine.prompt_of(ids, images, getattr(request, "cache_salt", None))]
        if not may_constrain:
            # Log-probabilities under a grammar are not those of the policy. Some parsers want one for any call that has
            # tools, and all of them for `parallel_tool_calls: false`, after which only the first call is shown anyway.
            request.structured_outputs = None
        return rendered if conversation is None else conversation, inputs

    async def _parsed(self, messages: list[Any], params: ChatParams, shows_images: bool) -> tuple[list[Any], Any]:
        """The messages as vLLM's templates get them, without rendering those that are not new; and what is no text."""
        tokenizer: Any = self.renderer.get_tokenizer()
        content_format = resolve_chat_template_content_format(
            chat_template=params.chat_template,
            tools=params.chat_template_kwargs.get("tools"),
            given_format=params.chat_template_content_format,
            tokenizer=tokenizer,
            model_config=self.model_config,
        )
        if shows_images and content_format != "openai":
            message = (
                "The model's chat template takes texts alone, no parts: its model cannot be shown images in calls."
            )
            raise VLLMValidationError(message, parameter="messages")
        conversation, multi_modal, _ = await parse_chat_messages_async(
            messages, self.model_config, content_format=content_format
        )
        known = self._as_the_template_knows_roles(conversation, params)
        return [plain_message(_with_names(one) if shows_images else one) for one in known], multi_modal

    def _as_the_template_knows_roles(self, conversation: list[Any], params: ChatParams) -> list[Any]:
        if all(message["role"] != "developer" for message in conversation):
            return conversation
        tokenizer: Any = self.renderer.get_tokenizer()
        template = resolve_chat_template(
            tokenizer,
            chat_template=params.chat_template,
            tools=params.chat_template_kwargs.get("tools"),
            model_config=self.model_config,
        )
        return with_known_roles(conversation, template)


@contextmanager
def _too_deep_messages_refused() -> Iterator[None]:
    """vLLM parses the arguments of tool calls without a limit to their depth: its answer would be a 500."""
    try:
        yield
    except RecursionError:
        raise VLLMValidationError(
            "a message is nested too deeply, or the arguments of a tool call in it are", parameter="messages"
        ) from None


def _asks_for_grammar(request: Any) -> bool:
    """Whether the caller asks that the answer fits something: a schema, a tool that must be called, or a strict one."""
    if request.extract_structured_outputs() is not None or request.tool_choice not in (None, "none", "auto"):
        return True
    # A tool of chat completions has its fields in `function`, one of responses has them itself.
    return any(getattr(getattr(tool, "function", tool), "strict", None) for tool in request.tools or ())


def _refuse_other_prompts(request: Any, asked: str) -> None:
    """Raises `VLLMValidationError`, whose sentence begins with what was asked."""
    changes_prompt = {name: getattr(request, name, None) for name in _REFUSED}
    changes_prompt["truncation"] = getattr(request, "truncation", None) not in (None, "disabled")
    changes_prompt["add_generation_prompt"] = getattr(request, "add_generation_prompt", True) is False
    for name in filter(changes_prompt.get, changes_prompt):
        raise VLLMValidationError(f"{asked} takes no `{name}`: its prompt is made of its own ids.", parameter=name)


def _with_marks(messages: list[Any]) -> tuple[list[Any], bool]:
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
    return marked, any(isinstance(text, str) and text.startswith(_MARK) for text in texts)


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
    return {"type": "text", "text": _MARK + name} if isinstance(name, str) and IMAGE_NAMES.match(name) else part


def _with_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message that vLLM has parsed, with the names of images in the place of their marks.

    Raises:
        VLLMValidationError: vLLM made texts of the parts, as it does with those of a tool's result.
    """
    content = message.get("content")
    if isinstance(content, str) and _MARK in content:
        shown = f"A message of role {message.get('role')!r} shows no images"
        raise VLLMValidationError(f"{shown}: show them in one of role 'user'.", parameter="messages")
    if not isinstance(content, list):
        return {**message}
    return {**message, "content": [_named_part(part) for part in content]}


def _named_part(part: Any) -> Any:
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str) or not text.startswith(_MARK):
        return part
    return {"type": "image", "image": text.removeprefix(_MARK)}


def _context_of(tools: Sequence[Mapping[str, Any]] | None, template_kwargs: Mapping[str, Any]) -> ChatContext:
    """The context of a chat. `template_kwargs` are all that vLLM hands to the chat template."""
    own = ("tools", "tokenize", "add_generation_prompt", "continue_final_message")
    kwargs = {name: value for name, value in template_kwargs.items() if name not in own and value is not None}
    return ChatContext(tools or None, kwargs or None)
