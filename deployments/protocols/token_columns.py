"""Columns of numbers beside the tokens of a generation: how they are made, joined, and cut. No I/O.

A column has one row for each token. `sampling_mask` alone is ragged: `sampling_mask_sizes` has the length of each row.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from deployments.failures import GenerationRejected
from rollout_client.contract.messages import NUMBER_BYTES, Message, NumberType, PackedNumbers

EXPERTS = "routed_experts"
MASK, MASK_SIZES = "sampling_mask", "sampling_mask_sizes"
Columns = Mapping[str, PackedNumbers]
_CODES: dict[NumberType, str] = {"uint8": "B", "uint16": "H", "int32": "i", "float32": "f"}


def packed_rows(values: Iterable[float], dtype: NumberType, row: Sequence[int] = ()) -> PackedNumbers:
    """The values as rows of this shape; there are whole rows of them."""
    return numbers_of(array(_CODES[dtype], values).tobytes(), dtype, row)


def numbers_of(data: bytes, dtype: NumberType, row: Sequence[int] = ()) -> PackedNumbers:
    rows = len(data) // (prod(row) * NUMBER_BYTES[dtype])
    return PackedNumbers.model_construct(dtype=dtype, shape=[rows, *row], data=data)


def _form_of(column: PackedNumbers) -> tuple[NumberType, list[int]]:
    """The type of its numbers and the shape of a row."""
    return column.dtype, column.shape[1:]


def rows_between(column: PackedNumbers, first: int, end: int) -> PackedNumbers:
    """Those of its rows from `first` to before `end` that there are."""
    width = prod(column.shape[1:]) * NUMBER_BYTES[column.dtype]
    return numbers_of(bytes(memoryview(column.data)[first * width : end * width]), *_form_of(column))


def joined_columns(first: Mapping[str, PackedNumbers | None], then: Columns) -> dict[str, PackedNumbers]:
    """Each column that both have in the same form: the rows of `first`, followed by those of `then`."""
    joined: dict[str, PackedNumbers] = {}
    for name, column in first.items():
        further = then.get(name)
        if column is not None and further is not None and _form_of(column) == _form_of(further):
            joined[name] = numbers_of(column.data + further.data, *_form_of(column))
    return joined


def all_rows(parts: Sequence[Columns]) -> dict[str, PackedNumbers]:
    """The columns of parts that follow each other and have the same ones."""
    return {
        name: numbers_of(b"".join(part[name].data for part in parts), *_form_of(column))
        for name, column in (parts[0] if parts else {}).items()
    }


def first_rows(columns: Columns, tokens: int, of_tokens: int) -> dict[str, PackedNumbers]:
    """The columns of the first `tokens` of a generation of `of_tokens`, more than that.

    Routed experts begin with those of the prompt and lack the last token; the last one that is kept has its own.
    """
    kept = dict(columns)
    for name, column in columns.items():
        if name == EXPERTS:
            kept[name] = rows_between(column, 0, column.shape[0] - (of_tokens - 1 - tokens))
        elif name == MASK:
            sizes = array(_CODES[columns[MASK_SIZES].dtype], columns[MASK_SIZES].data)
            kept[name] = rows_between(column, 0, sum(sizes[:tokens]))
        else:
            kept[name] = rows_between(column, 0, tokens)
    return kept


class RoutedExperts:
    """The routed experts of the first tokens of one message log: `rows` of them, from its first token on.

    Rows are only appended, like tokens: a token keeps the experts with which the token after it was sampled.
    """

    def __init__(self, posted: Iterable[Message] = (), all_rows: PackedNumbers | None = None) -> None:
        """Begins with the rows that came with the messages of a posted log, or with `all_rows`."""
        self._parts: list[PackedNumbers] = []
        """Those of a posted log are held once for all rollouts of its group."""
        self.rows = 0
        if all_rows is not None:
            self.add(all_rows)
        for message in posted:
            column = message.routed_experts
            if column is None or not self.takes(column):
                break
            self.add(column)
            if column.shape[0] < len(message.token_ids):
                break

    def add(self, column: PackedNumbers) -> None:
        """Raises `GenerationRejected` if the rows have another shape than those that are there."""
        if not self.takes(column):
            there = self._parts[0]
            raise GenerationRejected(
                f"The model's routed_experts are {column.dtype} of shape {column.shape[1:]} a token, those of the "
                f"posted message_log {there.dtype} of {there.shape[1:]}: post the log without them."
            )
        self._parts.append(column)
        self.rows += column.shape[0]

    def takes(self, column: PackedNumbers) -> bool:
        """Whether the rows have the shape of those that are there."""
        return not self._parts or _form_of(column) == _form_of(self._parts[0])

    def packed(self) -> PackedNumbers | None:
        """All rows; `None` if there is none."""
        if not self._parts:
            return None
        return numbers_of(b"".join(part.data for part in self._parts), *_form_of(self._parts[0]))

    def of_messages(self, messages: Iterable[Message]) -> list[Message]:
        """The messages of the log with their rows; those of whose tokens no row is known stay as they are."""
        shown, all_rows, first = list[Message](), self.packed(), 0
        for message in messages:
            if all_rows is not None and first < all_rows.shape[0]:
                rows = rows_between(all_rows, first, first + len(message.token_ids))
                shown.append(message.model_copy(update={EXPERTS: rows}))
            else:
                shown.append(message)
            first += len(message.token_ids)
        return shown
