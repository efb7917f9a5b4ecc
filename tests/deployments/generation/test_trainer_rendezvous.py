"""How a worker meets a trainer: nobody waits for it, and what was given up changes nothing."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from threading import Event

import pytest

from deployments.generation.trainer_transfer import EARLIER, TrainerRendezvous
from service.startup.ports import free_port

LONG_ENOUGH_S = 40.0


@dataclass(frozen=True)
class InitInfo:
    master_address: str
    master_port: int


@dataclass
class Backend:
    """vLLM's side: its rendezvous lasts until `go_on`, and nothing interrupts it."""

    fails: bool = False
    go_on: Event = field(default_factory=Event)
    has_begun: Event = field(default_factory=Event)
    calls: list[str] = field(default_factory=list)
    device: None = None

    def init_transfer_engine(self, _init_info: InitInfo) -> None:
        self.calls.append("init")
        self.has_begun.set()
        assert self.go_on.wait(LONG_ENOUGH_S)
        if self.fails:
            raise RuntimeError("the trainer hung up")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture
def trainer() -> Iterator[InitInfo]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield InitInfo("127.0.0.1", listener.getsockname()[1])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_ENOUGH_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_connection_is_there_when_the_rendezvous_has_ended(trainer: InitInfo) -> None:
    backend = Backend()
    rendezvous = TrainerRendezvous(backend, trainer)
    assert backend.has_begun.wait(LONG_ENOUGH_S)
    assert (rendezvous.state(), rendezvous.waits_for) == ((False, None), "the trainer does not answer")
    backend.go_on.set()
    until(lambda: rendezvous.state() == (True, None))
    assert rendezvous.connection() is backend
    assert backend.calls == ["init"]


def test_a_rendezvous_that_fails_says_why(trainer: InitInfo) -> None:
    backend = Backend(fails=True)
    backend.go_on.set()
    rendezvous = TrainerRendezvous(backend, trainer)
    until(lambda: rendezvous.state() == (True, "RuntimeError: the trainer hung up"))


def test_where_nobody_listens_vllm_does_not_begin_and_giving_up_ends_the_thread() -> None:
    backend, port = Backend(), free_port()
    rendezvous = TrainerRendezvous(backend, InitInfo("127.0.0.1", port))
    until(lambda: rendezvous.waits_for == f"nobody listens at 127.0.0.1:{port}")
    rendezvous.give_up()
    assert rendezvous.wait(LONG_ENOUGH_S)
    assert "init" not in backend.calls


def test_a_trainer_that_listens_later_is_met() -> None:
    backend, port = Backend(), free_port()
    backend.go_on.set()
    rendezvous = TrainerRendezvous(backend, InitInfo("127.0.0.1", port))
    until(lambda: rendezvous.waits_for.startswith("nobody listens"))
    with closing(socket.create_server(("127.0.0.1", port))):
        until(lambda: rendezvous.state() == (True, None))
    assert backend.calls == ["init"]


def test_a_connection_that_comes_after_it_was_given_up_is_closed(trainer: InitInfo) -> None:
    backend = Backend()
    rendezvous = TrainerRendezvous(backend, trainer)
    assert backend.has_begun.wait(LONG_ENOUGH_S)
    rendezvous.give_up()
    assert backend.calls == ["init"], "vLLM's rendezvous cannot be interrupted"
    backend.go_on.set()
    assert rendezvous.wait(LONG_ENOUGH_S)
    assert backend.calls == ["init", "shutdown"]


def test_a_connection_that_is_given_up_because_another_worker_has_none_is_closed(trainer: InitInfo) -> None:
    backend = Backend()
    backend.go_on.set()
    rendezvous = TrainerRendezvous(backend, trainer)
    assert rendezvous.wait(LONG_ENOUGH_S)
    rendezvous.give_up()
    assert backend.calls == ["init", "shutdown"]


def test_the_next_rendezvous_waits_for_one_that_was_given_up(trainer: InitInfo) -> None:
    silent, backend = Backend(), Backend()
    backend.go_on.set()
    earlier = TrainerRendezvous(silent, trainer)
    assert silent.has_begun.wait(LONG_ENOUGH_S)
    earlier.give_up()
    rendezvous = TrainerRendezvous(backend, trainer, earlier)
    until(lambda: rendezvous.waits_for == EARLIER)
    assert (rendezvous.state(), backend.calls) == ((False, None), [])
    silent.go_on.set()
    until(lambda: rendezvous.state() == (True, None))
    assert (silent.calls, backend.calls) == (["init", "shutdown"], ["init"])
