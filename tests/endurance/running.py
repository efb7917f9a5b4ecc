"""What the programs of endurance share: a service for their length, and rounds that count over several runs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from typing import TypeVar

from rich.console import Console

from benchmarks.process_group import no_process_left
from service.startup.local_service import sentences_for_the_user
from tests.endurance.chaos.results import OfAKind

Service = TypeVar("Service")


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
