"""A service for the length of a program of endurance."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from rich.console import Console

from benchmarks.process_group import no_process_left
from service.startup.local_service import sentences_for_the_user

Service = TypeVar("Service")


@contextmanager
def running(console: Console, service: AbstractContextManager[Service]) -> Iterator[Service]:
    """The service for the length of the block; no process of it is left, and what fails is said in a sentence."""
    with sentences_for_the_user(console), no_process_left(), service as started:
        yield started
