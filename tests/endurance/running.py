"""What the programs of endurance share: a service for their length, and rounds that count over several runs."""

from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import Field
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar, Protocol, TypeVar

from rich.console import Console

from benchmarks.process_group import no_process_left
from service.startup.local_service import sentences_for_the_user
from tests.endurance.reporting import finish, rounds_shown
from tests.endurance.result_lines import append, read

Service = TypeVar("Service")


class OfAKind(Protocol):
    """The result of a round, a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def kind(self) -> str: ...

    def problems(self) -> list[str]:
        """A sentence for each thing that does not hold."""
        ...


Result = TypeVar("Result", bound=OfAKind)


@contextmanager
def running(console: Console, service: AbstractContextManager[Service]) -> Iterator[Service]:
    """The service for the length of the block; no process of it is left, and what fails is said in a sentence."""
    with sentences_for_the_user(console), no_process_left(), service as started:
        yield started


def in_turn(kinds: Sequence[str], rounds: int, before: Sequence[OfAKind], minutes: float) -> Iterator[str]:
    """The kinds by turns, until each has `rounds`, those that were played `before` among them; none after `minutes`."""
    until, played = monotonic() + 60 * minutes, Counter(one.kind for one in before)
    for number in range(rounds):
        for kind in kinds:
            if monotonic() > until:
                return
            if played[kind] <= number:
                yield kind


async def played(console: Console, file: Path, rounds: AsyncGenerator[Result, None]) -> list[Result]:
    """Plays the rounds, shows each and appends it to the file."""
    finished: list[Result] = []
    with rounds_shown(console, None) as show:
        async with aclosing(rounds):
            async for one in rounds:
                append(file, one)
                finished.append(one)
                show(f"{one.kind}; {sum(len(each.problems()) for each in finished)} problems")
    return finished


def report(
    console: Console,
    finished: Sequence[Result],
    file: Path,
    result: type[Result],
    totals: Callable[[Sequence[Result]], dict[str, Any]],
) -> None:
    """Prints the problems of the rounds of this run, and what all in the file come to, by kind.

    Raises:
        typer.Exit: there are problems; the exit code is 1.
    """
    grouped = defaultdict[str, list[Result]](list)
    for one in read(file, result):
        grouped[one.kind].append(one)
    kinds = {kind: {"rounds": len(each), **totals(each)} for kind, each in sorted(grouped.items())}
    problems = [problem for one in finished for problem in one.problems()]
    finish(console, problems, {"kinds": kinds, "rounds_of_this_run": len(finished)})


def sums(rounds: Sequence[OfAKind], *names: str) -> dict[str, int]:
    return {name: sum(getattr(finished, name) for finished in rounds) for name in names}
