"""Records that an environment and the service exchange, and the exceptions that an environment raises."""

import math
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Discriminator, Field, FiniteFloat, GetPydanticSchema, JsonValue, Tag
from typing_extensions import TypedDict


class SampleRejected(Exception):
    """The sample's `extra_env_info` is not a state of this task.

    An environment raises it when `extra_env_info` has the right fields but cannot be played, such as a game that is
    over. The service reports the sample as failed, with this message, and does not retry it.
    """


class TemporaryFailure(Exception):
    """Something that the step needs is temporarily unavailable; the sample itself is fine.

    An environment raises it for a server that does not answer or a connection that broke. The service retries the step
    as often as the request's `retries` allow, and then reports the sample as failed, but retryable.
    """


class OutcomeInvalid(Exception):
    """A step did not return a valid `StepOutcome`. The message names the field and the problem."""


Role = Literal["system", "user", "assistant", "tool", "environment"]
"""Role of a message. A model's chat template may know only some of them; `user` is known to all."""

StopString = Annotated[str, Field(min_length=1, max_length=1024)]
"""Text after which a generation ends. The stop string stays in the text."""

LARGEST_REWARD = 3.4028234663852886e38
"""The largest float32. Sums and variances of rewards within it are finite in float64."""


def refuse_beyond_float32(reward: float | dict[str, float]) -> float | dict[str, float]:
    """Returns `reward`. Raises `ValueError` if a number of it is larger than float32 can hold."""
    largest = max(map(abs, reward.values()), default=0.0) if isinstance(reward, dict) else abs(reward)
    if largest > LARGEST_REWARD:
        raise ValueError(f"{largest:g} is beyond float32, in which trainers hold rewards")
    return reward


def refuse_half_surrogates(text: str) -> str:
    """Returns `text`. Raises `ValueError` for a lone surrogate, which cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(f"it holds {half!a}, half of a surrogate pair, which UTF-8 cannot express") from error
    return text


def escaped_half_surrogates(text: str) -> str:
    """`text` with lone surrogates written out as `\\udc00`, for a message that must be writable."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


Text = Annotated[str, AfterValidator(refuse_half_surrogates)]


def refuse_unwritable(value: Any) -> Any:
    """Returns `value`. Raises `ValueError` for NaN, infinity or a lone surrogate anywhere in it."""
    if isinstance(value, dict):
        for name, item in value.items():
            refuse_half_surrogates(name)
            refuse_unwritable(item)
    elif isinstance(value, list):
        for item in value:
            refuse_unwritable(item)
    elif isinstance(value, str):
        refuse_half_surrogates(value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"it holds {value}, which JSON cannot express")
    return value


Reward = Annotated[
    FiniteFloat | dict[str, FiniteFloat], AfterValidator(refuse_beyond_float32), AfterValidator(refuse_unwritable)
]
Metrics = Annotated[dict[str, FiniteFloat], AfterValidator(refuse_unwritable)]

JsonObject = Annotated[
    dict[str, Any],
    GetPydanticSchema(lambda _, schema_of: schema_of(dict[str, JsonValue])),
    AfterValidator(refuse_unwritable),
]
"""Object validated as JSON at any depth. The values are typed `Any`, so that a `dict[str, int]` is accepted too."""


class ChatMessage(TypedDict):
    """A message as environments and chat templates see it: text without token ids."""

    role: Role
    content: Text
    """Whole text, with the markup of calls and reasoning."""
    images: NotRequired[list[bytes | str]]
    """Images that a message shows before its text: of an observation the bytes of PNG or JPEG files, or names of
    images; of the messages that an environment gets the names alone, `sha256:...`. For models that see."""
    name: NotRequired[Text]
    """Name of the speaker, or of the tool that a message of role `tool` comes from."""
    tool_call_id: NotRequired[Text]
    """The call that a message of role `tool` answers."""
    tool_calls: NotRequired[list[JsonObject]]
    """The calls of an assistant message, if the service has a parser for them: `{"id": ..., "type": "function",
    "function": {"name": ..., "arguments": JSON text}}`. A prompt's message has those of its sample."""
    reasoning_content: NotRequired[Text]
    """The reasoning of an assistant message, if the service has a parser for it."""
    parsed_content: NotRequired[Text]
    """`content` without calls and reasoning; missing if the parser found neither."""
    parse_error: NotRequired[Text]
    """Reason why a response, or the calls in it, could not be parsed, such as invalid JSON."""
    finish_reason: NotRequired[Literal["stop", "length"]]
    """End of the response that is judged: `length` if its length has cut it, `stop` if the policy ended it."""
    token_count: NotRequired[int]
    """Length in tokens of the response that is judged."""


def with_written_images(outcome: dict[str, Any]) -> dict[str, Any]:
    """The fields of an outcome as JSON holds them: the bytes of an image are `{"base64": ...}`."""
    return with_images(
        outcome, lambda image: {"base64": b64encode(image).decode()} if isinstance(image, bytes) else image
    )


def with_read_images(outcome: dict[str, Any]) -> dict[str, Any]:
    """Counterpart of `with_written_images`."""
    return with_images(outcome, lambda image: b64decode(image["base64"]) if isinstance(image, dict) else image)


def with_images(outcome: dict[str, Any], image_of: Callable[[Any], Any]) -> dict[str, Any]:
    def shown(message: Any) -> Any:
        return {**message, "images": [*map(image_of, message["images"])]} if "images" in message else message

    observation = outcome["observation"] or {}
    seen = [*map(shown, observation)] if isinstance(observation, list) else shown(observation)
    return {**outcome, "observation": seen or outcome["observation"]}


ONE_MESSAGE, SEVERAL_MESSAGES = "one message", "several messages"
"""Parts of the paths that pydantic reports which are not names of fields."""


Observation = Annotated[
    Annotated[ChatMessage, Tag(ONE_MESSAGE)] | Annotated[list[ChatMessage], Field(min_length=1), Tag(SEVERAL_MESSAGES)],
    Discriminator(lambda observation: SEVERAL_MESSAGES if isinstance(observation, list) else ONE_MESSAGE),
]


@dataclass(frozen=True, slots=True)
class StartOutcome:
    """Additions of an environment to a sample before its first response."""

    observation: Observation | None = None
    """The message that follows the prompt, or several; None adds none."""
    metadata: JsonObject | None = None
    """The `extra_env_info` of the first step; None leaves it unchanged."""
    next_stop_strings: list[StopString] | None = None
    """The stop strings of the generations; None leaves those that the request has."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of one step."""

    observation: Observation | None
    """The message that follows the response in the message log; or several, such as one of role `tool` for each call
    of the response. None adds none, which only a step that ends the rollout can do."""
    reward: Reward
    """Reward of this step alone. The service sums rewards by name; a plain number has the name `reward`."""
    terminated: bool
    """Whether this step ends the rollout."""
    metadata: JsonObject | None = None
    """The `extra_env_info` of the next step; None leaves it unchanged."""
    next_stop_strings: list[StopString] | None = None
    """The stop strings of all later generations; None leaves them unchanged, an empty list means no stop strings."""
    answer: Text | None = None
    """Answer that the environment read from the response, such as the number in a box; None if it found none."""
    metrics: Metrics | None = None
    """Counts and times that are not rewards, such as malformed calls. The service sums those of all steps by
    name, and shows their spread over the rollouts of a request."""

    @property
    def observations(self) -> list[ChatMessage]:
        """`observation` as a list, also if it is one message or none."""
        if self.observation is None:
            return []
        return self.observation if isinstance(self.observation, list) else [self.observation]
