"""The ports through which chat messages become token ids, and token ids become text, tool calls and reasoning.

The rollout loop calls both. `TransformersChatTokenizer` (`deployments/chat/chat_tokenizer.py`) implements
`ChatTokenizer` with the model's own tokenizer. `ProcessResponseParser` (`service/remote/response_parser.py`) implements
`ResponseParser` with vLLM's parsers (`deployments/generation/response_parser.py`) in processes of their own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from deployments.protocols.images import ImageTokens
from rollout_client.contract.messages import ContentPart, ImagePart, MediaRange, Message, PromptMessage
from rollout_client.contract.rollouts import ObservationFormat
from rollout_env import ChatMessage


@dataclass(frozen=True, slots=True)
class FromHub:
    """How a model of the Hub and its tokenizer are loaded, by vLLM and by the service alike."""

    revision: str | None = None
    """Branch, tag or commit of the model; `None` for the newest of its main branch."""
    tokenizer_revision: str | None = None
    """Branch, tag or commit of the tokenizer; `None` for `revision`."""
    trust_remote_code: bool = False
    """Whether code in the repository is run."""

    @property
    def for_tokenizer(self) -> str | None:
        return self.tokenizer_revision or self.revision


FROM_MAIN = FromHub()


@dataclass(frozen=True, slots=True)
class ResponseToParse:
    """A whole response, and what its parsers want to know of its sample."""

    token_ids: Sequence[int]
    prompt_token_ids: Sequence[int] = ()
    """All ids before the response."""
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    turn: int = 0
    """How many responses of the rollout came before it: the ids of its calls differ from theirs."""


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """Parts read out of a response. None of them has tokens: those of the response are never changed."""

    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """In OpenAI's form: `{"id": ..., "type": "function", "function": {"name": ..., "arguments": JSON text}}`."""
    reasoning_content: str | None = None
    parsed_content: str | None = None
    """The text without calls and reasoning; `None` if there are none of them."""
    parse_error: str | None = None
    """Why the response, or the calls in it, could not be read."""


class ResponseParser(Protocol):
    """Reads tool calls and reasoning out of responses. The rollout loop calls it."""

    async def parse(self, response: ResponseToParse) -> ParsedResponse:
        """Parses a response; one that cannot be read has a `parse_error`. Raises nothing; the call may be cancelled."""


OPTIONAL_FIELDS = ("name", "tool_call_id", "tool_calls", "reasoning_content", "parsed_content", "parse_error")
"""Fields of a message beside its role and its content."""


def chat_message(message: Message | PromptMessage) -> ChatMessage:
    """The message without its numbers."""
    chat: ChatMessage = {"role": message.role, "content": _text_of(message.content)}
    fields = message.__dict__
    for name in OPTIONAL_FIELDS:
        if (value := fields.get(name)) is not None:
            chat[name] = value  # type: ignore[literal-required]  # one of ChatMessage's keys
    if images := images_of(message):
        chat["images"] = [*images]
    return chat


def images_shown(messages: Iterable[ChatMessage]) -> list[str]:
    """The names of all images that an observation shows, in order: its environment's replica has named them."""
    return [str(image) for message in messages for image in message.get("images", ())]


def images_of(message: Message | PromptMessage) -> Sequence[str]:
    """The names of the images that a message shows, in order."""
    if isinstance(message, Message):
        return [shown.media for shown in message.mm_ranges or ()]
    parts = message.content if isinstance(message.content, list) else ()
    return [part.image for part in parts if isinstance(part, ImagePart)]


def judged_log(messages: Iterable[Message]) -> list[ChatMessage]:
    """The messages as an environment gets them that judges the last one."""
    log = list(messages)
    chat = [chat_message(message) for message in log]
    response = log[-1]
    chat[-1]["token_count"] = len(response.token_ids)
    if response.finish_reason is not None:
        chat[-1]["finish_reason"] = response.finish_reason
    return chat


def _text_of(content: str | Sequence[ContentPart] | None) -> str:
    """The text of a prompt's message, which a chat template may take as parts, as a message log has it."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join("" if isinstance(part, ImagePart) else part.text for part in content)


def prompt_message(message: PromptMessage, token_ids: Sequence[int], mm_ranges: Sequence[MediaRange] = ()) -> Message:
    """The message with its part of the prompt's tokens."""
    return Message.model_construct(**fields_of(chat_message(message), token_ids, mm_ranges))


def fields_of(message: ChatMessage, token_ids: Sequence[int], mm_ranges: Sequence[MediaRange]) -> dict[str, Any]:
    """Those of a `Message` that has these tokens."""
    fields: dict[str, Any] = {**message, "token_ids": token_ids}
    fields.pop("images", None)
    return fields | {"mm_ranges": [*mm_ranges]} if mm_ranges else fields


Calls = Sequence[Mapping[str, Any]]
"""Calls of tools, as an assistant's message has them."""
SplitSpecialTokens = Literal["none", "observations", "all"]
"""Whose texts are data, in which the spelling of a control token is ordinary text."""
CONTEXT_TOKENS = 32
"""More tokens than the text of the next one depends on: decoders look back a word, or the bytes of one character."""


class UnsupportedTokenizer(Exception):
    """The model's tokenizer or chat template cannot carry a rollout token-exactly."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How messages become token ids: the format of observations, and the arguments of the chat template."""

    observation_format: ObservationFormat = "chat"
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    has_observations: bool = False
    """Whether an environment made messages of the prompt."""
    echoes_answers: bool = False
    """Whether the answers in a prompt are the model's, as a caller has them from the service and sends them back."""
    images: dict[str, ImageTokens] = field(default_factory=dict)
    """Those that are known, by name: of all images that messages show, before they are tokenized."""


@dataclass(frozen=True, slots=True)
class TokenizedObservation:
    """A message's token ids, the text that exactly these ids cover, and whether ids were cut off after them."""

    token_ids: list[int]
    content: str
    was_cut: bool
    mm_ranges: Sequence[MediaRange] = ()
    """Which of the tokens stand for images."""


class ChatTokenizer(Protocol):
    """The tokenizer as an episode calls it."""

    def prompt(self, messages: Sequence[PromptMessage], options: ChatOptions, max_tokens: int) -> list[Message]:
        """Renders messages up to the generation prompt, each with its part of the tokens.

        Raises:
            PromptRejected: the chat template refuses the messages, or they have more than `max_tokens` tokens.
        """

    def extends(self, rendered: Sequence[int], log: Sequence[int]) -> bool:
        """Whether the rendered ids begin with the text of the log, but for white space and tokens that end a turn."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response: without special tokens, or at least without the one that ends its turn."""

    def pieces(self, token_ids: Sequence[int], before: Sequence[int]) -> list[str | None]:
        """The text that each token adds after the ids `before`, as the engine reads it when it looks for stop strings.

        `None`: the text so far ends inside a character, which later tokens complete. Of `before`, the last
        `CONTEXT_TOKENS` are enough.
        """

    def observations(
        self, messages: Sequence[ChatMessage], after: Sequence[int], options: ChatOptions, room: int, calls: Calls = ()
    ) -> list[TokenizedObservation]:
        """Tokenizes the messages of an observation, at least one, that follow the generated ids `after`.

        They are rendered together, and the first `room` ids are kept. Of messages that have none of these, only the
        first is in the result, without text.

        Args:
            calls: those that were read out of the response. Chat templates take names and ids from them for the
                messages of role `tool` that answer them.

        Raises:
            EnvironmentRejected: the chat template cannot render the messages.
        """
