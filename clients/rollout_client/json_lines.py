"""Lines of JSON: those of a file with their numbers, and those of a stream as models. No I/O.

Lines end at \\n only: a text may contain U+0085 and U+2028, at which other readers split too.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from rollout_client.errors import not_understood

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
Model = TypeVar("Model", bound=BaseModel)


def numbered_lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, opened in binary, that are not empty, with their numbers from 1 on.

    A byte-order mark, which some editors write, is not part of the first line.
    """
    for number, line in enumerate(file, start=1):
        content = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if content.strip():
            yield number, content


class LineReader(Generic[Model]):
    """Turns the bytes of a stream, in chunks of any size, into a model for each line.

    Args:
        what: the name of a line in errors.
    """

    def __init__(self, model: type[Model], what: str) -> None:
        self._model = model
        self._what = what
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[Model]:
        """Yields the lines that `chunk` completes. Raises `ResponseNotUnderstood` for one that is not a model."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        # An empty line is a heartbeat of the service.
        for line in filter(None, lines):
            try:
                yield self._model.model_validate_json(line)
            except ValidationError as error:
                raise not_understood(self._what, error) from error


def without_nulls(value: Any) -> Any:
    """`value` without the fields that are null, of which columns have one in each row that lacks the field."""
    if isinstance(value, dict):
        return {name: without_nulls(held) for name, held in value.items() if held is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
