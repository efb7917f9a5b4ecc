"""Values of a caller as JSON, in the body of every call. No I/O.

Numbers, arrays and tensors of numpy and torch become numbers and lists of them; neither package is imported.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from pydantic import BaseModel
from pydantic_core import from_json, to_json

from rollout_client.contract.base import set_fields
from rollout_client.errors import NotJson, shortened

Step = str | int
"""A field, or an index in a list."""
CONVERTED = re.compile(r"(torch\.)?(bool|u?int|b?float|object|<U)")
"""The element types of numpy and torch that are numbers, texts, or objects that are looked at one by one."""


def as_given(value: Any) -> Any:
    """`value` with a dict in place of each model, which has only the fields that were set."""
    if isinstance(value, list | tuple):
        return [as_given(item) for item in value]
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value


def list_of(numbers: Any) -> list[Any]:
    """The items of an iterable, or of an array or tensor of one dimension."""
    return cast(list[Any], numbers.tolist() if hasattr(numbers, "tolist") else list(numbers))


def json_bytes(value: object, place: str = "") -> bytes:
    """`value` as JSON text.

    Args:
        place: put before the field of an error.

    Raises:
        NotJson: it holds something that JSON does not have; the error names the first by its field.
    """
    try:
        return to_json(value, fallback=converted)
    except (TypeError, ValueError, RuntimeError) as error:
        steps, found = first_refused(value)
        sample = steps[1] if steps[:1] == ["samples"] and len(steps) > 1 and isinstance(steps[1], int) else None
        raise NotJson(field_of(steps, place), shortened(repr(found)), type(found).__qualname__, sample) from error


def json_value(value: object, place: str = "") -> Any:
    """A copy of `value` in the types of JSON, which shares nothing with it. Arguments and errors as of `json_bytes`."""
    return from_json(json_bytes(value, place))


def converted(value: Any) -> object:
    """The numbers in a value that pydantic does not know. Raises `TypeError` if it has others or none."""
    if CONVERTED.match(str(getattr(value, "dtype", ""))) is None or not hasattr(value, "tolist"):
        raise TypeError(f"{type(value).__name__} is no number")
    plain = value.tolist()
    if type(plain) is type(value):
        raise TypeError(f"{type(value).__name__} has no counterpart in Python")
    return plain


def first_refused(value: object) -> tuple[list[Step], object]:
    """The innermost value that is refused, and the steps that lead to it."""
    steps: list[Step] = []
    above: set[int] = set()
    while id(value) not in above:
        above.add(id(value))
        for step, inner in parts_of(value):
            if is_refused(inner):
                steps.append(step)
                value = inner
                break
    return steps, value


def is_refused(value: object) -> bool:
    try:
        to_json(value, fallback=converted)
    except (TypeError, ValueError, RuntimeError):
        return True
    return False


def parts_of(value: Any) -> Iterator[tuple[Step, object]]:
    if isinstance(value, BaseModel):
        value = set_fields(value)
    elif str(getattr(value, "dtype", "")) == "object":
        value = value.tolist()
    if isinstance(value, Mapping):
        yield from ((str(name), inner) for name, inner in value.items())
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def field_of(steps: list[Step], place: str) -> str:
    """As in `samples[3].extra_env_info.seed`."""
    text = place
    for step in steps:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text
