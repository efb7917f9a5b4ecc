"""The task that chaos plays: sliding puzzles that write down each step, to see which turns were done twice."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deployments.tasks.sliding_puzzle import SlidingPuzzleEnvironment, SlidingPuzzleState
from rollout_env import ChatMessage, StepOutcome

Turn = tuple[int, int]
"""The number of a game, and of one of its turns."""


class StepLog:
    """A file that all replicas of the environment append to: a line is one write, also of a replica that is killed."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def add(self, turn: Turn) -> None:
        with self._file.open("a") as file:
            file.write(f"{turn[0]} {turn[1]}\n")

    def end(self) -> int:
        """A place for `since`."""
        return self._file.stat().st_size if self._file.exists() else 0

    def since(self, place: int) -> Counter[Turn]:
        """How often each turn was stepped after the log had `place` bytes."""
        with self._file.open() as file:
            file.seek(place)
            return Counter((int(game), int(turn)) for game, turn in map(str.split, file))


def turns_done_again(steps: Mapping[Turn, int]) -> Counter[int]:
    """By game, how many steps were one too many; games without one are not there."""
    again: Counter[int] = Counter()
    for (game, _), times in steps.items():
        again[game] += times - 1
    return +again


class CountedGame(SlidingPuzzleState):
    game: int
    """Its number among the samples."""


class CountedPuzzleEnvironment(SlidingPuzzleEnvironment):
    ExtraEnvInfo = CountedGame

    def __init__(self, steps_file: str) -> None:
        self._steps = StepLog(Path(steps_file))

    async def step(self, message_log: list[ChatMessage], extra_env_info: SlidingPuzzleState) -> StepOutcome:
        assert isinstance(extra_env_info, CountedGame)
        outcome = await super().step(message_log, extra_env_info)
        game = extra_env_info.game
        self._steps.add((game, sum(message["role"] == "assistant" for message in message_log)))
        assert outcome.metadata is not None
        outcome.metadata["game"] = game
        return outcome

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        samples = super().example_samples(count, seed)
        for number, sample in enumerate(samples):
            sample["extra_env_info"]["game"] = number
        return samples


def counted_puzzle(steps_file: Path) -> dict[str, Any]:
    """Its section of a Serve config."""
    return {
        "import_path": f"{CountedPuzzleEnvironment.__module__}:{CountedPuzzleEnvironment.__name__}",
        "arguments": {"steps_file": str(steps_file)},
    }
