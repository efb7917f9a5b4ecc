"""`Call`: one HTTP request of any resource, and how the body of its response is read. No I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from rollout_client.errors import not_understood

JSON = "application/json"
NDJSON = "application/x-ndjson"

Result = TypeVar("Result")
Part = TypeVar("Part")
Model = TypeVar("Model", bound=BaseModel)
Query = Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """One HTTP request, and how the body of its response is read."""

    method: str
    path: str
    read: Callable[[Any], Result]
    accept: str = JSON
    query: Query = field(default_factory=dict)
    body: bytes | None = None
    content_headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": JSON})
    """The headers that describe `body`, where there is one."""
    join: Callable[[Sequence[bytes]], bytes | memoryview] = b"".join
    """Makes one body, for `read`, of the chunks that arrived."""

    @property
    def headers(self) -> dict[str, str]:
        return {"accept": self.accept, **({} if self.body is None else self.content_headers)}

    def picking(self, pick: Callable[[Result], Part]) -> "Call[Part]":
        """The same request; its result is `pick` of this one's."""
        return Call(
            self.method,
            self.path,
            lambda body: pick(self.read(body)),
            self.accept,
            self.query,
            self.body,
            self.content_headers,
            self.join,
        )


def call_for(
    model: type[Model],
    method: str,
    path: str,
    *,
    query: Mapping[str, int | float | str | None] | None = None,
    body: bytes | None = None,
    **request: Any,
) -> Call[Model]:
    """A call whose response is a `model`. Entries of `query` that are `None` are left out."""

    def read(body: bytes) -> Model:
        return parsed(model, f"The response of {method} {path}", body)

    return Call(method, path, read, query=without_none(query or {}), body=body, **request)


def call_without_result(
    method: str,
    path: str,
    *,
    query: Mapping[str, int | float | str | None] | None = None,
    body: bytes | None = None,
) -> Call[None]:
    return Call(method, path, lambda _body: None, query=without_none(query or {}), body=body)


def parsed(model: type[Model], what: str, body: bytes) -> Model:
    """Raises `ResponseNotUnderstood`, which calls the body `what`."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise not_understood(what, error) from error


def without_none(values: Mapping[str, Part | None]) -> dict[str, Part]:
    return {name: value for name, value in values.items() if value is not None}
