"""One rollout as a row of another project's training data, in each format of `export_rollouts`. No I/O.

A row ends with its last trained response. Texts are rendered by their reader's chat template: calls and reasoning that
were parsed are fields of the message there, and not in its content.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollout_client.contract.messages import JsonObject, Message, may_be_trained
from rollout_client.contract.rollouts import SampleResult
from rollout_client.results import images_shown, is_generated, trained_places

Row = JsonObject
Turns = Literal["all", "last"]
"""Which responses of a rollout are trained, of those that may be: all of them, or the last one, with those before it in
its prompt."""
ImageSource = Callable[[str], str]
"""Names an image in a row, by its name `sha256:...`: that name, a path or a data URL. Raises `DoesNotFit`."""
VERL_IMAGE = "<image>"
VERL_PLACEHOLDERS = (VERL_IMAGE, "<video>")
TRL_ROLES = ("system", "user", "assistant", "tool")
IGNORED = -100
"""Label of a token that TRL leaves out of the loss."""


class DoesNotFit(Exception):
    """A rollout gives no row; the message is the reason, which is counted."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a rollout up to its last response that may be trained."""

    messages: Sequence[Message]
    start: int
    """Index of the first trained response; all from there on that may be trained are."""

    @classmethod
    def of(cls, sample: SampleResult, turns: Turns) -> "Conversation":
        """Raises `DoesNotFit` if nothing was generated that may be trained, or nothing comes before it."""
        places = trained_places(sample)
        if not places:
            raise DoesNotFit(nothing_to_train(sample))
        if not places[0]:
            raise DoesNotFit("no prompt")
        return cls(sample.message_log[: places[-1] + 1], places[0] if turns == "all" else places[-1])

    def is_trained(self, place: int) -> bool:
        return place >= self.start and may_be_trained(self.messages[place])

    @property
    def texts(self) -> list[str]:
        return [message.content for message in self.messages]

    @property
    def prompt_key(self) -> list[tuple[str, str, tuple[str, ...]]]:
        return prompt_key(self.messages[: self.start])

    def chat(self, source_of: ImageSource) -> Row:
        """Raises `DoesNotFit` for images where TRL takes none."""
        messages: list[Any] = [template_message(message) for message in self.messages]
        images: Row = {}
        if names := images_shown(self.messages):
            self._check_images()
            images = {"images": [source_of(name) for name in names]}
            for message, written in zip(self.messages, messages, strict=True):
                if message.mm_ranges:
                    written["content"] = [{"type": "image"} for _ in message.mm_ranges] + text_parts(written["content"])
        return {"prompt": messages[: self.start], "completion": messages[self.start :], **images}

    def _check_images(self) -> None:
        if images_shown(self.messages[self.start :]):
            raise DoesNotFit(
                "an image after the first trained response, and TRL takes images in the prompt alone: take the last "
                "response with turns=last"
            )
        if any(message.mm_ranges and message.role == "tool" for message in self.messages):
            raise DoesNotFit("an image in a message of role tool, where TRL takes none")
        if others := [message.role for message in self.messages if message.role not in TRL_ROLES]:
            raise DoesNotFit(f"a message of role {others[0]}, which TRL takes in no row with images")

    def has_untrained_from(self, first: int) -> bool:
        """Whether one of the assistant's messages from this place on must not be trained."""
        places = range(first, len(self.messages))
        return any(self.messages[place].role == "assistant" and not self.is_trained(place) for place in places)

    def check_assistants(self) -> None:
        """Raises `DoesNotFit` if the completion has a message of the assistant that must not be trained."""
        if self.has_untrained_from(self.start):
            raise DoesNotFit(
                "an assistant message that must not be trained, and the format trains on all from the first response "
                "on: take the last with turns=last"
            )

    def check_no_observation(self) -> None:
        """Raises `DoesNotFit` if a message that the policy did not write freely would be trained."""
        if not all(may_be_trained(message) for message in self.messages[self.start :]):
            raise DoesNotFit(
                "several responses, and the format trains on all between them: take the last with turns=last"
            )


def nothing_to_train(sample: SampleResult) -> str:
    """Why a rollout without a response that may be trained gives no row."""
    if any(map(is_generated, sample.message_log)):
        return "no response that may be trained: each was constrained, or greedy in a request that samples"
    return "no response"


def prompt_key(messages: Sequence[Message]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Equal for equal prompts: the role, text and images of each message."""
    return [(message.role, message.content, tuple(images_shown([message]))) for message in messages]


def text_parts(text: Any) -> list[Any]:
    return [{"type": "text", "text": text}] if text else []


def in_parts(message: Any) -> Any:
    """The message with its text as a part of its content, as those have it that show images."""
    return {**message, "content": text_parts(message["content"])} if isinstance(message["content"], str) else message


def template_message(message: Message, arguments_as_text: bool = False) -> Row:
    """The message as chat templates take it, without null fields."""
    given = message.model_dump(
        include={"role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content"}, exclude_none=True
    )
    if is_generated(message) and (message.tool_calls or message.reasoning_content is not None):
        given["content"] = message.parsed_content or ""
    if message.tool_calls and not arguments_as_text:
        given["tool_calls"] = [with_read_arguments(call) for call in message.tool_calls]
    return given


def with_read_arguments(call: JsonObject) -> JsonObject:
    """The call with its arguments as an object, which templates write as JSON again; as they are if they are none."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(text)
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def template_fields(sample: SampleResult) -> Row:
    """Fields that TRL passes to the chat template. `tools` is JSON text: a column of schemas would fill in nulls."""
    fields: Row = {}
    if sample.tools:
        fields["tools"] = json.dumps(sample.tools)
    if sample.chat_template_kwargs:
        fields["chat_template_kwargs"] = sample.chat_template_kwargs
    return fields


def verl_row(conversation: Conversation, sample: SampleResult, source_of: ImageSource) -> Row:
    """verl trains on every assistant message, and has no mask of its own. Its texts have a word for each image."""
    if conversation.has_untrained_from(0):
        raise DoesNotFit("an assistant message that must not be trained, and verl trains on all of them")
    messages: list[Any] = [template_message(message, arguments_as_text=True) for message in conversation.messages]
    row: Row = {"messages": messages}
    if names := images_shown(conversation.messages):
        if any(word in said["content"] for said in messages for word in VERL_PLACEHOLDERS):
            raise DoesNotFit("a text with <image> or <video> beside images, and verl takes the word for one of them")
        for message, said in zip(conversation.messages, messages, strict=True):
            said["content"] = VERL_IMAGE * len(message.mm_ranges or ()) + said["content"]
        row["images"] = [{"image": source_of(name)} for name in names]
    if sample.tools:
        row["tools"] = list(sample.tools)
    if "enable_thinking" in (sample.chat_template_kwargs or {}):
        row["enable_thinking"] = bool((sample.chat_template_kwargs or {})["enable_thinking"])
    return row


def openai_row(conversation: Conversation, sample: SampleResult, source_of: ImageSource) -> Row:
    """OpenAI's roles are fixed: what an environment says is said by the user. Weights are those of assistants alone."""
    messages: list[Any] = []
    for place, message in enumerate(conversation.messages):
        said = template_message(message, arguments_as_text=True)
        said.pop("reasoning_content", None)
        if message.role == "environment":
            said["role"] = "user"
        if message.role == "assistant":
            said["weight"] = int(conversation.is_trained(place))
        if names := images_shown([message]):
            if said["role"] != "user":
                raise DoesNotFit(f"an image in a message of role {message.role}, where the form takes none")
            shown = [{"type": "image_url", "image_url": {"url": source_of(name)}} for name in names]
            said["content"] = shown + text_parts(said["content"])
        messages.append(said)
    return {"messages": messages, **({"tools": list(sample.tools)} if sample.tools else {})}


def trained_tokens(sample: SampleResult, turns: Turns) -> tuple[list[int], list[int]]:
    """The token ids up to the last one that is trained, and for each 1 if it is trained.

    Raises:
        DoesNotFit: no generated token that may be trained.
    """
    places = trained_places(sample)
    trained = set(places if turns == "all" else places[-1:])
    if images_shown(sample.message_log):
        raise DoesNotFit("it shows images, and a row of tokens has no place for them")
    token_ids: list[int] = []
    mask: list[int] = []
    for place, message in enumerate(sample.message_log):
        token_ids += message.token_ids
        mask += [int(place in trained)] * len(message.token_ids)
    if 1 not in mask:
        raise DoesNotFit("no tokens of a response" if places else nothing_to_train(sample))
    end = len(mask) - mask[::-1].index(1)
    return token_ids[:end], mask[:end]


def labelled_row(tokens: tuple[list[int], list[int]]) -> Row:
    labels: list[Any] = [token if is_trained else IGNORED for token, is_trained in zip(*tokens, strict=True)]
    return {"input_ids": list(tokens[0]), "labels": labels}


def datum_row(tokens: tuple[list[int], list[int]]) -> Row:
    """The arguments of a `tinker.Datum`. The shift by one token is made here: a target is the token after its input."""
    token_ids, mask = tokens
    if len(token_ids) < 2:
        raise DoesNotFit("no token before the response's")
    targets, weights = token_ids[1:], [float(is_trained) for is_trained in mask[1:]]
    return {
        "model_input": list(token_ids[:-1]),
        "loss_fn_inputs": {"target_tokens": list(targets), "weights": list(weights)},
    }
