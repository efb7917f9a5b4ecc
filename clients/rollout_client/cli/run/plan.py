"""The plan of a run: which rows are still to be played, with which seeds, and which groups have ended. No I/O.

Guarantees, in whatever order rollouts end and wherever a stream breaks:

- a group leaves the plan once, whole and in the order of its generations;
- a row is in at most one request at a time;
- what a broken stream left of a group is dropped, and the whole group is played again.

Seeds go by row, so that a run gives the same rollouts however it is cut into requests.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from rollout_client.calls.rollouts import RolloutOptions
from rollout_client.contract.base import Lenient
from rollout_client.contract.rollouts import SampleResult


def with_seeds(samples: Sequence[Mapping[str, Any]], options: RolloutOptions) -> list[dict[str, Any]]:
    """Each sample with its `idx`, by default its row, and a seed of its own if the sampling has one."""
    sampling = options.get("sampling")
    seed = sampling.get("seed") if isinstance(sampling, Mapping) else None
    seeds = [{} if seed is None else {"seed": _row_seed(seed, row)} for row in range(len(samples))]
    return [{"idx": row, **of_row, **sample} for row, (of_row, sample) in enumerate(zip(seeds, samples, strict=True))]


def _row_seed(seed: int, row: int) -> int:
    """In [0, 2^63), and unrelated to those of other rows."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest()) >> 1


INPUT_ROW = "input_row"
"""The field of each rollout that says which row of the input it plays, from 0."""


def input_row(part: Lenient) -> Any:
    """The value of `INPUT_ROW`; `None` without one."""
    return (part.model_extra or {}).get(INPUT_ROW)


class RunPlan:
    def __init__(self, row_count: int, group_size: int, done: Set[int] = frozenset()) -> None:
        self._group_size = group_size
        self._waiting = deque(row for row in range(row_count) if row not in done)
        self._groups: dict[int, dict[int, SampleResult]] = {}
        """The rollouts that have ended, by generation, of each row that is being played."""

    def next_chunk(self, size: int) -> list[int]:
        """The rows of the next request, at most `size`; none if all are played or being played."""
        rows = [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]
        self._groups.update((row, {}) for row in rows)
        return rows

    def add(self, row: int, sample: SampleResult) -> list[SampleResult] | None:
        """The group of `row`, if `sample` is the last of it; `None` before.

        Raises `ValueError` if the row is not being played, or the rollout has ended already.
        """
        group = self._groups.get(row)
        if group is None or sample.generation_index in group:
            raise ValueError(f"Generation {sample.generation_index} of row {row} was not asked for.")
        group[sample.generation_index] = sample
        if len(group) < self._group_size:
            return None
        del self._groups[row]
        return [group[generation] for generation in sorted(group)]

    def give_back(self, rows: Iterable[int]) -> None:
        """Queues those of `rows` whose groups have not ended again, before all others."""
        unfinished = [row for row in rows if self._groups.pop(row, None) is not None]
        self._waiting.extendleft(reversed(unfinished))
