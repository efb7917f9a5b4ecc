"""`Call`: one HTTP request of any resource, and how the body of its response is read. No I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from rollout_client.errors import not_understood

JSON = "application/json"
NDJSON = "application/x-ndjson"

Result = TypeVar("Result")
Value = TypeVar("Value")
Model = TypeVar("Model", bound=BaseModel)
Query = Mapping[str, int | float | str | None]


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """One HTTP request, and how the body of its response is read."""

    method: str
    path: str
    read: Callable[[Sequence[bytes]], Result]
    """Takes the body in the chunks that arrived."""
    accept: str = JSON
    query: Query = field(default_factory=dict)
    """Entries that are `None` are not sent."""
    body: bytes | None = None
    content_headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": JSON})
    """The headers that describe `body`, where there is one."""

    @property
    def headers(self) -> dict[str, str]:
        return {"accept": self.accept, **({} if self.body is None else self.content_headers)}


def call_for(model: type[Model], method: str, path: str, **request: Any) -> Call[Model]:
    """A call whose response is a `model`; `request` has the other fields of `Call`.

    Reading the response raises `ResponseNotUnderstood` if it is none.
    """

    def read(chunks: Sequence[bytes]) -> Model:
        try:
            return model.model_validate_json(b"".join(chunks))
        except ValidationError as error:
            raise not_understood(f"The response of {method} {path}", error) from error

    return Call(method, path, read, **request)


def nothing(_chunks: Sequence[bytes]) -> None:
    """Reads the response of a call without a result."""


def path_of(*segments: str | int) -> str:
    return "".join(f"/{quote(str(segment), safe='')}" for segment in segments)


def without_none(values: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in values.items() if value is not None}
