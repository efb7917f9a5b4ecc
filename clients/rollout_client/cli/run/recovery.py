"""What a file of results holds after its writer was killed: the whole groups, and the bytes that they take. No I/O.

A group is appended in one piece. A kill can leave any part of the last piece: that part is cut off, and its group is
played again. Anything else that is not in order was not written by a run, and is an error.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from rollout_client.calls.ndjson import BYTE_ORDER_MARK
from rollout_client.cli.run.plan import INPUT_ROW
from rollout_client.cli.run.totals import Totals


@dataclass(slots=True)
class Recovered:
    kept_bytes: int = 0
    """Length of the whole groups, which stand at the beginning of the file."""
    rows: set[int] = field(default_factory=set)
    """The rows of the input whose groups they are."""
    totals: Totals = field(default_factory=Totals)


def recovered(lines: Iterable[bytes], num_generations: int) -> Recovered:
    """Reads the lines of the file, each with its end.

    Raises `ValueError` that names the line which no run with `num_generations` wrote.
    """
    found = Recovered()
    end = 0
    group: list[dict[str, Any]] = []
    torn: int | None = None
    for number, line in enumerate(lines, start=1):
        if torn is not None:
            raise ValueError(f"line {torn} is no rollout, and others follow it")
        end += len(line)
        rollout = rollout_of(line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line)
        if rollout is None:
            torn = number
            continue
        check_place(rollout, group, found.rows, number)
        group.append(rollout)
        if len(group) == num_generations:
            found.rows.add(rollout[INPUT_ROW])
            found.kept_bytes = end
            for ended in group:
                found.totals.add(
                    ended["status"],
                    ended["total_reward"],
                    ended["metrics"]["assistant_tokens"],
                    [
                        message.get("finish_reason")
                        for message in ended["message_log"]
                        if message.get("generation_logprobs") is not None
                    ],
                )
            group = []
    return found


def rollout_of(line: bytes) -> dict[str, Any] | None:
    """`None` for a line that is not whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = from_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def check_place(rollout: dict[str, Any], group: list[dict[str, Any]], rows: set[int], number: int) -> None:
    """Raises `ValueError` unless `rollout` is the next of `group`, or the first of a row that is not there yet."""
    row, generation = rollout.get(INPUT_ROW), rollout.get("generation_index")
    if not isinstance(row, int):
        raise ValueError(f"line {number} has no {INPUT_ROW}")
    if generation != len(group) or row in rows or (group and row != group[0][INPUT_ROW]):
        raise ValueError(f"line {number} has generation {generation} of row {row}, which does not come there")
