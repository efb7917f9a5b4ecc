"""The messages of a rollout, as callers send them and the service returns them, and what of them may be trained."""

import re
from array import array
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rollout_client.contract.base import LABEL, Lenient, Strict
from rollout_client.contract.origins import ReplayRecord

Role = Literal["system", "user", "assistant", "tool", "environment"]
FinishReason = Literal["stop", "length"]
TokenId = Annotated[int, Field(ge=0)]
MOST_TOOLS = 128
JsonObject = dict[str, JsonValue]


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    """Names the kind of part."""
    text: str
    """The text of the part."""


IMAGE_NAME = r"^sha256:[0-9a-f]{64}$"
MOST_PARTS = 256


class ImagePart(Strict):
    """An image within a message, for models that see."""

    type: Literal["image"]
    """Names the kind of part."""
    image: str = Field(pattern=r"^(sha256:[0-9a-f]{64}$|data:image/)")
    """The name of an image that was uploaded (`POST /v1/blobs`), as `sha256:` and its hash; or the image itself as a
    data URL."""


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]
FIELDS_OF_OTHERS = {"text": "image", "image": "text"}
"""The field that a part of this type has not. A column of Parquet gives it to all parts, as null."""


def _without_null_of_others(part: object) -> object:
    if isinstance(part, dict) and isinstance(type_ := part.get("type"), str):
        other = FIELDS_OF_OTHERS.get(type_)
        if other in part and part[other] is None:
            return {name: value for name, value in part.items() if name != other}
    return part


def _text_or_parts(content: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Says in one sentence what is wrong, where pydantic would say it for each kind of content. A part may have the
    field of another kind, if it is null."""
    given = [*map(_without_null_of_others, content[: MOST_PARTS + 1])] if isinstance(content, list) else content
    try:
        return validate(given)
    except ValidationError as error:
        message = (
            "Input should be a text, or a list of parts: {'type': 'text', 'text': ...} or {'type': 'image', 'image': "
            "'sha256:...' or a data URL}"
        )
        raise PydanticCustomError("content", message) from error


class PromptMessage(Strict):
    """A message as the chat template takes it."""

    role: Role
    """Who speaks."""
    content: Annotated[
        str | Annotated[list[ContentPart], Field(max_length=MOST_PARTS, fail_fast=True)] | None,
        WrapValidator(_text_or_parts),
    ] = None
    """The text of the message, or its parts where the template takes parts: texts and images; null only beside
    `tool_calls`."""
    name: str | None = None
    """Name of the speaker, for templates that use it."""
    tool_calls: list[JsonObject] | None = Field(default=None, max_length=MOST_TOOLS, fail_fast=True)
    """Calls that an assistant message makes, in the form that the chat template expects."""
    tool_call_id: str | None = None
    """The call that a tool message answers."""
    reasoning_content: str | None = None
    """The reasoning before an assistant message's content, for templates that use it."""

    @model_validator(mode="after")
    def has_content(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing: only a message with tool_calls may have none")
        return self


class WeightVersionSpan(Lenient):
    """Tokens `[start, end)` of the message were sampled by the weights called `version`."""

    version: Annotated[str, Field(pattern=LABEL)]
    """Number of the version, as text; of a named policy with its name, as in `run-b/7`."""
    start: int = Field(ge=0)
    """Index of the first token of the span within the message."""
    end: int = Field(ge=0)
    """Index after the last token of the span."""


class MediaRange(Lenient):
    """Tokens `[start, end)` of the message stand for an image."""

    media: Annotated[str, Field(pattern=IMAGE_NAME)]
    """The name of the image: `sha256:` and the hash of its content. `GET /v1/blobs/{name}` has it."""
    start: int = Field(ge=0)
    """Index of its first token within the message."""
    end: int = Field(ge=0)
    """Index after its last token."""


def _decoded_base64(data: object) -> object:
    return b64decode(data, validate=True) if isinstance(data, str) else data


def encoded_base64(data: bytes) -> str:
    return b64encode(data).decode()


NumberType = Literal["uint8", "uint16", "int32", "float32"]
MOST_DIMENSIONS = 8
"""The product of a longer shape would take long."""
NUMBER_BYTES: dict[NumberType, int] = {"uint8": 1, "uint16": 2, "int32": 4, "float32": 4}


class PackedNumbers(Lenient):
    """Numbers of a message, one row for each of its tokens, as the bytes of an array. numpy reads them without a copy:
    `numpy.frombuffer(packed.data, packed.dtype).reshape(packed.shape)`."""

    dtype: NumberType
    """The type of each number; of more than one byte in little-endian order."""
    shape: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(min_length=1, max_length=MOST_DIMENSIONS)
    """Number of rows, then the shape of a row."""
    data: Annotated[bytes, BeforeValidator(_decoded_base64), PlainSerializer(encoded_base64, return_type=str)]
    """The numbers, row by row; in JSON, and in what `model_dump` returns, as base64."""

    @model_validator(mode="after")
    def has_all_numbers(self) -> Self:
        if 0 in self.shape[1:]:
            raise ValueError(f"a row of shape {self.shape[1:]} has no number")
        if len(self.data) != prod(self.shape) * NUMBER_BYTES[self.dtype]:
            raise ValueError(f"{len(self.data)} bytes are not the numbers of shape {self.shape} in {self.dtype}")
        return self


class SampledWith(Lenient):
    """The distribution that a message was sampled from."""

    temperature: float = Field(ge=0, allow_inf_nan=False)
    """0 was greedy: nothing was drawn, and `generation_logprobs` are those of temperature 1."""
    top_p: float = Field(default=1.0, allow_inf_nan=False)
    """As sampled; 1 kept all tokens."""
    top_k: int = 0
    """As sampled; 0 kept all tokens."""
    min_p: float = Field(default=0.0, allow_inf_nan=False)
    """As sampled; 0 kept all tokens."""


class Message(Lenient):
    """A message with its tokens. The concatenated `token_ids` of a log are exactly what the engine saw."""

    role: Role
    """Who speaks."""
    content: str
    """The text of the message; for a generated message, all of its decoded tokens, without special tokens unless
    `responses.skip_special_tokens` of the service's config is false."""
    token_ids: list[TokenId] = Field(fail_fast=True)
    """The tokens of the message, in order."""
    generation_logprobs: list[float] | None = Field(default=None, fail_fast=True)
    """One natural log-probability per token of a generated message, under the distribution that was sampled from (after
    temperature, top-p, top-k and min-p); for greedy decoding, under temperature 1. A message without them was not
    generated by the policy: mask its tokens out of the loss, as those of `constrained` and greedy ones
    (`rollout_client.contract.messages.may_be_trained`)."""
    finish_reason: FinishReason | None = None
    """Why a generation ended. `stop`: end token or stop string; `length`: `max_new_tokens` or `max_seq_len`. Null on a
    message with `generation_logprobs`: its generation was interrupted. As the last one of a posted log it goes on from
    its last token, or from before what could begin a stop string; with a reason it is stepped next."""
    weight_versions: list[WeightVersionSpan] | None = Field(default=None, fail_fast=True)
    """Which weights sampled the tokens of a generated message, as spans that cover them in order."""
    reward: float | None = None
    """The environment's reward for this message."""
    name: str | None = None
    """Name of the speaker, or of the tool that speaks."""
    tool_call_id: str | None = None
    """The call that a tool message answers."""
    tool_calls: list[JsonObject] | None = Field(default=None, fail_fast=True)
    """The calls that were read out of a generated message, as `{"id": ..., "type": "function", "function": {"name":
    ..., "arguments": JSON text}}`; those of a prompt's message as they were sent. `content` still has their text."""
    reasoning_content: str | None = None
    """The reasoning that was read out of a generated message, or that came with a prompt's. `content` of a generated
    message still has it."""
    parsed_content: str | None = None
    """`content` without calls and reasoning, if there are any."""
    parse_error: str | None = None
    """Why a generated message, or the calls in it, could not be read; `content` is what the model wrote."""
    constrained: bool | None = None
    """True of a message of an agent's call that made tokens more or less likely whatever the policy says: by a JSON
    schema or grammar, a tool that is `strict` or must be called, `logit_bias` (also one that moves nothing), allowed or
    forbidden tokens, penalties of presence, frequency or repetition, `min_tokens`, a budget of thinking, arguments of
    the engine's plugins or given tokens. Leave it out of the loss."""
    sampled_with: SampledWith | None = None
    """How an agent's call sampled the message, where that is not how the request (the session) says; null where it is.
    Its `generation_logprobs` are of this distribution. One of temperature 0 is no sample: leave it out of the loss."""
    mm_ranges: list[MediaRange] | None = None
    """Which tokens stand for images, in order; only on a message that shows some."""
    routed_experts: PackedNumbers | None = None
    """With `include: ["routed_experts"]`: the experts that each layer has chosen for each token, of shape [tokens,
    layers, experts of a token], on every message. Tokens at the end of the log that no engine has computed have no row:
    the last one that was sampled, and an observation after it."""
    top_token_ids: PackedNumbers | None = None
    """With `include: ["top_logprobs:N"]`, on a generated message: the N most likely tokens at each place, the most
    likely first, of shape [tokens, N]."""
    top_logprobs: PackedNumbers | None = None
    """The log-probabilities of `top_token_ids`, under the distribution that `generation_logprobs` are of; -inf for a
    token that could not be sampled."""
    sampling_mask: PackedNumbers | None = None
    """With `include: ["sampling_mask"]`, on a generated message: the tokens that could be sampled at each place, after
    top-k, top-p and min-p, one place after the other."""
    sampling_mask_sizes: PackedNumbers | None = None
    """How many tokens of `sampling_mask` belong to each place, of shape [tokens]."""
    entropy: PackedNumbers | None = None
    """With `include: ["entropy"]`, on a generated message: the entropy in nats of the distribution that each token was
    sampled from, of shape [tokens]."""


COLUMN_FORMS: dict[str, tuple[frozenset[NumberType], int]] = {
    "routed_experts": (frozenset({"uint8", "uint16"}), 3),
    "top_token_ids": (frozenset({"int32"}), 2),
    "top_logprobs": (frozenset({"float32"}), 2),
    "sampling_mask": (frozenset({"int32"}), 1),
    "sampling_mask_sizes": (frozenset({"uint16"}), 1),
    "entropy": (frozenset({"float32"}), 1),
}
"""The types that the numbers of each may have, and how many dimensions the column has."""
COLUMN_FIELDS = frozenset(COLUMN_FORMS)
"""The fields of a message that hold what `include` has asked for."""


class GivenMessage(Message):
    """A message of a posted `message_log`; a message that the service returned can be posted unchanged."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, from_attributes=True)

    @model_validator(mode="after")
    def has_numbers_of_its_tokens(self) -> Self:
        count, logprobs = len(self.token_ids), self.generation_logprobs
        if logprobs is not None and len(logprobs) != count:
            raise ValueError(f"{len(logprobs)} generation_logprobs for {count} token_ids: send as many")
        if self.mm_ranges and logprobs is not None:
            raise ValueError(
                "mm_ranges of tokens that were generated: no sampled token stands for an image, leave it out"
            )
        place = 0
        for shown in self.mm_ranges or ():
            if not place <= shown.start < shown.end <= count:
                raise ValueError(
                    f"mm_ranges has [{shown.start}, {shown.end}) after {place} of {count} tokens: send ranges in "
                    "order, which do not overlap"
                )
            place = shown.end
        for name in COLUMN_FIELDS & self.model_fields_set:
            column: PackedNumbers | None = getattr(self, name)
            if column is not None:
                _check_column(name, column, self)
        return self


def _check_column(name: str, column: PackedNumbers, message: GivenMessage) -> None:
    """Raises `ValueError` if the column of this name has another type, other dimensions, or not a row for each token.

    Tokens at the end of a log have no experts. Those of a mask are as many as its sizes say.
    """
    types, dimensions = COLUMN_FORMS[name]
    if column.dtype not in types or len(column.shape) != dimensions:
        allowed = f"{' or '.join(sorted(types))} with {dimensions} dimensions"
        raise ValueError(f"{name} is {column.dtype} of shape {column.shape}: send {allowed}")
    due, rows = len(message.token_ids), column.shape[0]
    if name == "sampling_mask":
        sizes = message.sampling_mask_sizes
        if sizes is None or sizes.dtype != "uint16" or sizes.shape != [due]:
            raise ValueError(f"sampling_mask needs sampling_mask_sizes for {due} token_ids: send both")
        due = sum(array("H", sizes.data))
    elif name == "sampling_mask_sizes" and message.sampling_mask is None:
        raise ValueError("sampling_mask_sizes needs a sampling_mask: send both")
    if rows > due or (rows < due and name != "routed_experts"):
        raise ValueError(f"{name} has {rows} rows in place of {due}: send one for each token")


class Branch(Lenient):
    """A further conversation of a rollout: of a subagent, of another seat, or one that the rollout has left."""

    message_log: list[Message]
    """Prompt and responses, with their tokens."""
    shared_messages: list[int] = []  # noqa: RUF012 - pydantic copies it
    """Indexes in `message_log` of generated messages that the rollout's own log, or an earlier branch, has too. A loss
    that must count each token once leaves them out."""
    rewards: dict[str, float] | None = None
    """Its own rewards by names, in place of those of the rollout: those of another seat of a game. Null where it shares
    the rollout's."""
    replay: ReplayRecord | None = None
    """Numbers by which its tokens can be generated again, with itself as the `message_log` of the rollout and the
    branches before it; null for one that an agent has played."""


INCLUDED = r"^(routed_experts|sampling_mask|entropy|top_logprobs:[1-9][0-9]{0,5})$"


def _one_that_is_known(name: str) -> str:
    if not re.fullmatch(INCLUDED, name):
        raise ValueError(
            "Input should be 'routed_experts', 'sampling_mask', 'entropy' or 'top_logprobs:N' with N from 1"
        )
    return name


def _each_named_once(include: list[str]) -> list[str]:
    kinds = Counter(name.partition(":")[0] for name in include)
    if repeated := [kind for kind, count in kinds.items() if count > 1]:
        raise ValueError(f"{repeated[0]} is named {kinds[repeated[0]]} times: name it once")
    return include


Included = Annotated[str, AfterValidator(_one_that_is_known), WithJsonSchema({"type": "string", "pattern": INCLUDED})]
Include = Annotated[list[Included], Field(max_length=4), AfterValidator(_each_named_once)]


def may_be_trained(message: Message | Mapping[str, Any]) -> bool:
    """Whether the tokens of a message may be in a loss: they are samples of the policy, and of nothing else.

    Those are not that no policy generated (without `generation_logprobs`), whose call made tokens more or less likely
    whatever the policy says (`constrained`), and those of a greedy call in a request that samples (`sampled_with`):
    nothing was drawn, and its log-probabilities are of no distribution that was sampled. Where the whole request is
    greedy its messages say nothing, and are trained by whoever asked for that.

    Args:
        message: a message, or its fields as JSON has them.
    """
    sampled_with = _field_of(message, "sampled_with")
    is_greedy = sampled_with is not None and _field_of(sampled_with, "temperature") == 0
    is_generated = _field_of(message, "generation_logprobs") is not None
    return is_generated and not _field_of(message, "constrained") and not is_greedy


def may_be_compared(message: Message | Mapping[str, Any]) -> bool:
    """Whether a trainer that computes with the request's temperature should find the message's log-probabilities: it
    may be trained, and was sampled as the request says."""
    return may_be_trained(message) and _field_of(message, "sampled_with") is None


def _field_of(given: Any, name: str) -> Any:
    """The field of a model, or of a mapping that may lack it."""
    return given.get(name) if isinstance(given, Mapping) else getattr(given, name)
