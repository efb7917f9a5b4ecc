"""Base classes of the contract's types, the fields that several requests share, and the contract of errors.

Requests are `Strict`, responses `Lenient`. `PolicyDemand` and `RolloutDemand` say which weights may generate,
`Priority` which share of the engines a request gets. Labels of versions are `7` or, of a named policy, `run-b/7`.
Every route answers a refused or failed request with a problem document of RFC 9457.
"""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

NAME = r"[A-Za-z][A-Za-z0-9._-]{0,63}"
NUMBER = r"[0-9]{1,19}"
"""A version as text: those of 2^63 - 1 and below have no more digits."""
LABEL = rf"^({NAME}/)?{NUMBER}$"
PolicyName = Annotated[str, Field(pattern=f"^{NAME}$")]


class VersionLabel(NamedTuple):
    """A version of the policy `name`; of the one without a name, whose versions are mostly full weights, if `None`."""

    name: str | None
    number: int


def label_of(name: str | None, number: int) -> str:
    """The name of a version in messages and answers."""
    return str(number) if name is None else f"{name}/{number}"


def read_label(label: str) -> VersionLabel:
    """The inverse of `label_of`; raises `ValueError` if it is not a label."""
    name, _, number = label.rpartition("/")
    return VersionLabel(name or None, int(number))


def _class_or_number(priority: object, validate: ValidatorFunctionWrapHandler) -> object:
    try:
        return validate(priority)
    except ValidationError as error:
        raise ValueError("Input should be 'interactive', 'train', 'batch' or a number from 0.001 to 1000") from error


Priority = Annotated[
    Literal["interactive", "train", "batch"] | Annotated[float, Field(ge=0.001, le=1000)],
    WrapValidator(_class_or_number),
]
"""The share of the engines that a request gets: the name of a class, or a number in proportion to `train`."""


def set_fields(model: BaseModel) -> dict[str, Any]:
    """The fields of `model` that were set, null or not, and its extra fields. Values are not converted."""
    was_set = model.model_fields_set
    fields = {name: value for name, value in model.__dict__.items() if name in was_set}
    return {**fields, **model.model_extra} if model.model_extra else fields


class Strict(BaseModel):
    """Base of requests: an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Lenient(BaseModel):
    """Base of responses: unknown fields are kept, so that an older client understands a newer service."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)


class PolicyDemand(Strict):
    """Which weights a request may begin with. Newer weights can replace them while it runs."""

    name: PolicyName | None = None
    """The policy, one of those that `GET /policy` lists under `named`: adapters, each with versions of its own, which
    the other fields count. By default the policy without a name."""
    min_version: int | None = Field(default=None, ge=0)
    """The request waits until this version, or a newer one, is current."""
    version: int | None = Field(default=None, ge=0)
    """The request waits until exactly this version is current; it is refused at once when a newer one is."""
    wait_s: float | None = Field(default=None, ge=0)
    """The request is refused (409) after this many seconds; the service's own limit is the default and the maximum."""


class RolloutDemand(PolicyDemand):
    """Which weights may generate the tokens of rollouts. Newer ones can replace them unless these fields say more."""

    version: int | None = Field(default=None, ge=0)
    """The request waits until exactly this version is current; it is refused at once when a newer one is. This version
    generates every token: a rollout that needs further tokens when a newer one has taken its place has an error of kind
    `policy`, and its log holds the tokens of this version."""
    max_staleness: int | None = Field(default=None, ge=0)
    """A rollout is cut off, with `status: stale`, as soon as the version that generated its oldest token is more than
    this many versions behind the current one. It is a difference of version numbers: where they skip numbers, it counts
    those too. By default no rollout is cut off."""


class FieldProblem(Lenient):
    """One thing that is wrong with a request."""

    field: str
    """Path of the field, such as `samples[0].task_name`; empty for a problem that is not of one field."""
    message: str
    """The problem, and what to do about it."""
    value: JsonValue = None
    """The offending value, shortened if it is long."""


class Problem(Lenient):
    """An error of a whole request, as a problem document of RFC 9457 (`application/problem+json`)."""

    type: str
    """URI of the kind of error: `urn:rollout:problem:` and a name, or `about:blank`."""
    title: str
    """The kind of error in words."""
    status: int
    """The HTTP status."""
    detail: str
    """The problem as text."""
    errors: list[FieldProblem] = Field(default_factory=list)
    """The problem field by field."""
    request_id: str | None = None
    """The request's `X-Request-ID`, or the id that the service gave it: it is in the service's logs too."""
