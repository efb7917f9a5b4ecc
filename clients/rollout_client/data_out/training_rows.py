"""One rollout as a row of training data, in each format of `export_rollouts`. No I/O.

A row ends with its last trained response. Texts are rendered by their reader's chat template: calls and reasoning that
were parsed are fields of the message there, and not in its content.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollout_client.contract.messages import JsonObject, Message, may_be_trained
from rollout_client.contract.rollouts import SampleResult
from rollout_client.results import images_shown, is_generated, token_row, trained_places

Row = JsonObject
Turns = Literal["all", "last"]
"""Which responses of a rollout are trained, of those that may be: all of them, or the last one, with those before it in
its prompt."""
ImageSource = Callable[[str], str]
"""Names an image in a row, by its name `sha256:...`: that name or a path. Raises `DoesNotFit`."""
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
        places = _places_to_train(sample)
        if not places[0]:
            raise DoesNotFit("no prompt")
        return cls(sample.message_log[: places[-1] + 1], places[0] if turns == "all" else places[-1])

    @property
    def completion(self) -> Sequence[Message]:
        return self.messages[self.start :]

    @property
    def prompt_key(self) -> list[tuple[str, str, tuple[str, ...]]]:
        return prompt_key(self.messages[: self.start])

    def chat(self, source_of: ImageSource) -> Row:
        """`prompt` and `completion`. Raises `DoesNotFit` for images where TRL takes none."""
        messages: list[Any] = [_template_message(message) for message in self.messages]
        images: Row = {}
        if names := images_shown(self.messages):
            self._check_images()
            images = {"images": [source_of(name) for name in names]}
            for message, written in zip(self.messages, messages, strict=True):
                if message.mm_ranges:
                    text = _text_parts(written["content"])
                    written["content"] = [{"type": "image"} for _ in message.mm_ranges] + text
        return {"prompt": messages[: self.start], "completion": messages[self.start :], **images}

    def _check_images(self) -> None:
        if images_shown(self.completion):
            raise DoesNotFit(
                "an image after the first trained response, and TRL takes images in the prompt alone: take the last "
                "response with turns=last"
            )
        if any(message.mm_ranges and message.role == "tool" for message in self.messages):
            raise DoesNotFit("an image in a message of role tool, where TRL takes none")
        if others := [message.role for message in self.messages if message.role not in TRL_ROLES]:
            raise DoesNotFit(f"a message of role {others[0]}, which TRL takes in no row with images")

    def check_completion(self, may_have_observations: bool) -> None:
        """Raises `DoesNotFit` if the completion has messages that must not be trained, and the reader trains on them.

        Args:
            may_have_observations: whether the reader masks all messages but the assistant's.
        """
        untrained = [message.role for message in self.completion if not may_be_trained(message)]
        if "assistant" in untrained:
            raise DoesNotFit(
                "an assistant message that must not be trained, and the format trains on all from the first response "
                "on: take the last with turns=last"
            )
        if untrained and not may_have_observations:
            raise DoesNotFit(
                "several responses, and the format trains on all between them: take the last with turns=last"
            )


def _places_to_train(sample: SampleResult) -> list[int]:
    """The indexes of the responses that may be trained. Raises `DoesNotFit` if there are none."""
    if places := trained_places(sample):
        return places
    if any(map(is_generated, sample.message_log)):
        raise DoesNotFit("no response that may be trained: each was constrained, or greedy in a request that samples")
    raise DoesNotFit("no response")


def prompt_key(messages: Sequence[Message]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Equal for equal prompts: the role, text and images of each message."""
    return [(message.role, message.content, tuple(images_shown([message]))) for message in messages]


def _text_parts(text: Any) -> list[Any]:
    return [{"type": "text", "text": text}] if text else []


def in_parts(message: Any) -> Any:
    """The message with its text as a part of its content, as those have it that show images."""
    return {**message, "content": _text_parts(message["content"])} if isinstance(message["content"], str) else message


def _template_message(message: Message) -> Row:
    """The message as chat templates take it: without null fields, and with the arguments of calls as objects."""
    given = message.model_dump(
        include={"role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content"}, exclude_none=True
    )
    if is_generated(message) and (message.tool_calls or message.reasoning_content is not None):
        given["content"] = message.parsed_content or ""
    if message.tool_calls:
        given["tool_calls"] = [_with_read_arguments(call) for call in message.tool_calls]
    return given


def _with_read_arguments(call: JsonObject) -> JsonObject:
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


def labelled_tokens(sample: SampleResult, turns: Turns) -> Row:
    """The token ids up to the last one that is trained, and their labels. Raises `DoesNotFit` if none is trained."""
    places = _places_to_train(sample)
    if images_shown(sample.message_log):
        raise DoesNotFit("it shows images, and a row of tokens has no place for them")
    row = token_row(sample)
    start = 0 if turns == "all" else sum(len(message.token_ids) for message in sample.message_log[: places[-1]])
    ends = [place + 1 for place, is_trained in enumerate(row.loss_mask) if is_trained and place >= start]
    if not ends:
        raise DoesNotFit("no tokens of a response")
    kept = row.part(0, ends[-1])
    labels: list[Any] = [
        token if is_trained and place >= start else IGNORED
        for place, (token, is_trained) in enumerate(zip(kept.token_ids, kept.loss_mask, strict=True))
    ]
    return {"input_ids": list(kept.token_ids), "labels": labels}
