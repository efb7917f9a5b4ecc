"""The messages between a session's record and its callers about a call of the engine, and how the session store refuses
one. No I/O.

    plan = record.plan(messages, context)       what of the conversation the session has generated
    prompt = prepared_prompt(plan, messages, context, renderer)     the template renders the messages after it
    ... the engine generates ...
    record.add(call)

The prompt consists of the engine's own ids for what was generated, and of rendered ids for what is new. The recording
client beside the engine renders; `prepared_prompt` says what it must render and puts the ids together.
"""

from array import array
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal, Protocol

from pydantic import PlainValidator

from deployments.failures import PromptRejected, StoreFailure
from deployments.protocols.chat import Calls
from deployments.protocols.generation import WeightSpan, packed_ids
from deployments.protocols.images import ImagesByName, ImageSpan, OtherPlaceholders, expanded, image_spans
from deployments.protocols.token_columns import Columns
from rollout_client.contract.messages import MediaRange, SampledWith
from rollout_client.contract.sessions import MessageDrift, SessionRequest

ChatMessage = Mapping[str, Any]
"""A message as the chat template gets it: OpenAI's fields. An image among its parts is a name, `{"type": "image",
"image": "sha256:..."}`."""


def _packed(code: str, stored: Any) -> "array[Any]":
    """Numbers from an entry of the storage, which has packed ones as base64 (`codec.py`)."""
    return array(code, b64decode(stored) if isinstance(stored, str) else stored)


TokenIds = Annotated[Sequence[int], PlainValidator(partial(_packed, "i"))]
Logprobs = Annotated[Sequence[float], PlainValidator(partial(_packed, "f"))]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt that its caller has tokenized, in the place of messages."""

    token_ids: Sequence[int]


Conversation = Sequence[ChatMessage] | TokenPrompt


@dataclass(frozen=True, slots=True)
class ChatContext:
    """Arguments of the chat template beside the messages. Conversations under different ones share nothing."""

    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of a conversation continues what its session has generated."""

    after: int | None
    """The generated message that the call continues, by its number in the record; `None`: it continues none."""
    covered: int
    """How many messages `token_ids` stand for. At least one message of a chat is left to render."""
    token_ids: TokenIds
    """The ids up to the end of that generated message, exactly as the engine had them."""
    response_ids: TokenIds
    """The ids of that generated message alone: the last of `token_ids`."""
    images: tuple[ImageSpan, ...] = ()
    """Those that `token_ids` stand for."""
    oldest_version: int | None = None
    """The oldest version of the session's policy that has generated one of `token_ids`; `None` if there is none."""
    experts_from: int = 0
    """The first of the prompt's tokens whose routed experts the session does not have."""
    drift: tuple[MessageDrift, ...] = ()
    """Differences from the record in the generated message that it continues, and in what comes after it."""


@dataclass(frozen=True, slots=True)
class RenderedMessage:
    """A message that was rendered for this call, with the ids of its part of the rendering."""

    message: ChatMessage
    token_ids: TokenIds
    mm_ranges: Sequence[MediaRange] = ()
    """Which of its ids stand for images, each by its name."""


@dataclass(frozen=True, slots=True)
class GeneratedMessage:
    """The response of one call of the engine, or one of its `n` choices."""

    id: str
    """Unique in the session. A reward names the message by it."""
    message: ChatMessage
    """The message as the harness saw it: content, tool calls and reasoning as the parsers read them."""
    text: str
    """All of its ids decoded, without special tokens."""
    token_ids: TokenIds
    logprobs: Logprobs
    """One natural log-probability for each id."""
    finish_reason: Literal["stop", "length"] | None
    """`None`: the generation was interrupted."""
    weight_versions: tuple[WeightSpan, ...] = ()
    is_constrained: bool = False
    """Whether its call made tokens more or less likely whatever the policy says."""
    sampled_with: SampledWith | None = None
    """The distribution that it was sampled from, if it is not the session's."""
    columns: Columns = field(default_factory=dict)
    """Those of the session's `include`, by their fields of a `Message`: a row for each id. Rows of `routed_experts` are
    for the tokens from the plan's `experts_from` on, those of the prompt among them, to the last but one."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One call of the engine, whole: its prompt as it was put together, and what it generated."""

    id: str
    """Unique in the session. A call that is added twice is recorded once."""
    context: ChatContext
    plan: Plan
    rendered: Sequence[RenderedMessage]
    """The messages after those that the plan covers, without the generation prompt. There is at least one, unless the
    prompt was tokenized by its caller and ends with a generated message."""
    generation_prompt: TokenIds
    """The ids after the last message that begin the response."""
    generated: Sequence[GeneratedMessage]


@dataclass(frozen=True, slots=True)
class OpenSession:
    """The request that opened a session. It does not change while the session lives."""

    id: str
    namespace: str
    """Its caller; empty for one without a key."""
    key_sha256: str
    """The hash of the session's own key, in hexadecimal digits."""
    base_url: str
    request: SessionRequest
    share_id: str | None = None
    """Set for an agent's rollout: the share of its `POST /rollout`, under which its calls were admitted."""


class SessionRenderer(Protocol):
    """The model's chat template and tokenizer, as the engine's server uses them. Threads may share it."""

    def prompt(self, messages: Sequence[ChatMessage], context: ChatContext) -> list[Sequence[int]]:
        """The ids of each message's part of the rendering of all of them, the last with the generation prompt."""
        ...

    def following(
        self, messages: Sequence[ChatMessage], after: Sequence[int], context: ChatContext, calls: Calls = ()
    ) -> list[Sequence[int]]:
        """The same for messages, at least one, that follow the generated ids `after`, without these.

        The first message begins with the end of the response's turn, as far as `after` does not have it.

        Args:
            calls: those of the response, which messages of role `tool` answer.
        """
        ...

    def generation_prompt(self, context: ChatContext) -> Sequence[int]:
        """The ids that the template puts after the last message to begin a response."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """The prompt of one call, and the parts of it that the record needs."""

    token_ids: Sequence[int]
    """The whole prompt."""
    rendered: tuple[RenderedMessage, ...]
    generation_prompt: Sequence[int]
    images: tuple[ImageSpan, ...] = ()
    """Those of the whole prompt."""


NO_PLAN = Plan(after=None, covered=0, token_ids=packed_ids(()), response_ids=packed_ids(()))
"""The plan of a call that continues nothing."""


def images_in(message: ChatMessage) -> list[str]:
    """The names of the images that a message shows, in order."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    return [part["image"] for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]


def new_images(plan: Plan, messages: Sequence[ChatMessage]) -> list[str]:
    """The names of the images whose tokens the plan does not have."""
    return [name for message in messages[plan.covered :] for name in images_in(message)]


def prepared_prompt(
    plan: Plan,
    messages: Sequence[ChatMessage],
    context: ChatContext,
    renderer: SessionRenderer,
    images: ImagesByName | None = None,
) -> PreparedPrompt:
    """Puts the prompt of a call together. `messages` are all of the call's, those that the plan covers included.

    Args:
        images: all `new_images`. Each is expanded here, once: later calls have its tokens in their plans.

    Raises:
        PromptRejected: the template does not write one placeholder for each image of a message.
        Exception: what the renderer raises.
    """
    new = messages[plan.covered :]
    if plan.after is None:
        ids = renderer.prompt(new, context)
    else:
        calls = messages[plan.covered - 1].get("tool_calls") or ()
        ids = renderer.following(new, plan.response_ids, context, calls)
    whole = [with_images(*each, images or {}) for each in zip(new, ids, strict=True)]
    token_ids = packed_ids(chain(plan.token_ids, *(message.token_ids for message in whole)))
    spans = (*plan.images, *image_spans(whole, len(plan.token_ids)))
    ending = packed_ids(renderer.generation_prompt(context))
    last = packed_ids(whole[-1].token_ids)
    # The generation prompt is recorded apart, because the same messages may go on with another message.
    if len(ending) <= len(last) and last[len(last) - len(ending) :] == ending:
        last = last[: len(last) - len(ending)]
    else:
        ending = packed_ids(())
    return PreparedPrompt(token_ids, (*whole[:-1], replace(whole[-1], token_ids=last)), ending, spans)


def prompt_of_tokens(plan: Plan, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> PreparedPrompt:
    """The prompt of a call whose caller has tokenized it: what is new in it is one message of role `user`.

    Raises:
        PromptRejected: it continues a conversation with images, whose tokens alone do not say what they show.
    """
    if plan.images:
        raise PromptRejected("The prompt continues a conversation with images: go on with messages.")
    new = packed_ids(token_ids[len(plan.token_ids) :])
    # The further field tells it from a message that a chat template renders.
    message = {"role": "user", "content": decode(new), "is_tokenized": True}
    rendered = (RenderedMessage(message, new),) if new else ()
    return PreparedPrompt(packed_ids(token_ids), rendered, packed_ids(()))


def with_images(message: ChatMessage, token_ids: Sequence[int], images: ImagesByName) -> RenderedMessage:
    """The message with the tokens of its images in the place of their placeholders. Raises `PromptRejected`."""
    try:
        ids, mm_ranges = expanded(token_ids, images_in(message), images)
    except OtherPlaceholders as error:
        raise PromptRejected(
            f"{error} in a message of role {message.get('role')!r}: show images in messages of another role, and leave "
            "out text that spells one."
        ) from error
    return RenderedMessage(message, packed_ids(ids), mm_ranges)


class SessionFailure(StoreFailure):
    """A call of the session store was not carried out."""


class SessionUnknown(SessionFailure):
    """The session never was, is another caller's, or has expired."""

    status = 404
    name = "session-unknown"
    title = "The session is not known"


class SessionClosed(SessionFailure):
    """The session takes no more calls: it was ended, or its deadline is over."""

    status = 409
    name = "session-closed"
    title = "The session takes no more calls"


class SessionLimitReached(SessionFailure):
    """The session has reached one of its limits, or the service has no room for another one."""

    status = 429
    name = "session-limit-reached"
    title = "A limit of the session is reached; nothing was started"
    retry_after_s = 2


class GenerationUnknown(SessionFailure):
    """The session has generated no message of this id."""

    status = 404
    name = "generation-unknown"
    title = "The session has generated no such message"


class SessionNotJudgeable(SessionFailure):
    """The session has generated nothing, or it was opened without a task that the service has."""

    status = 409
    name = "session-not-judgeable"
    title = "No environment can judge the session"


class JudgementFailed(SessionFailure):
    """The environment refused the conversation, or broke: `value` is the kind of the failure."""

    status = 502
    name = "judgement-failed"
    title = "The environment has not judged the session"


class SessionsNotConfigured(SessionFailure):
    """The config has no `sessions`."""

    status = 501
    name = "sessions-not-configured"
    title = "The service keeps no sessions"


def session_unknown(session_id: str) -> SessionUnknown:
    message = "there is no such session: it has expired, or it is another caller's"
    return SessionUnknown.of("session_id", message, session_id)
