"""A transfer in the worker: the rendezvous, and the watch for a silent trainer."""

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import pytest

from deployments.generation.trainer_transfer import EARLIER, TrainerRendezvous, TrainerWatch
from service.startup.config import free_port

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


class Model:
    def __init__(self) -> None:
        self.loaded: list[Any] = []

    def load_weights(self, weights: Iterable[Any]) -> int:
        self.loaded.extend(weights)
        return len(self.loaded)


def test_silence_makes_it_hang_up_once_so_that_what_waits_can_fail() -> None:
    hung_up: list[str] = []
    fails = Event()

    def hang_up() -> None:
        hung_up.append("now")
        fails.set()

    with TrainerWatch(0.05, hang_up) as watch:
        assert fails.wait(LONG_ENOUGH_S)
        time.sleep(0.1)
    assert (watch.has_hung_up, hung_up) == (True, ["now"])


def test_a_block_that_ends_in_time_is_left_at_once() -> None:
    began = time.monotonic()
    with TrainerWatch(LONG_ENOUGH_S, pytest.fail) as watch:
        pass
    assert time.monotonic() - began < LONG_ENOUGH_S
    assert not watch.has_hung_up


@pytest.mark.slow
def test_each_tensor_counts_as_a_sign_of_life() -> None:
    """The whole takes longer than the limit, and no tensor does."""

    def attempt(limit_s: float) -> bool:
        def arriving() -> Iterable[int]:
            for number in range(8):
                time.sleep(limit_s / 5)
                yield number

        model = Model()
        with TrainerWatch(limit_s, lambda: None) as watch, watch.noting_weights_of(model):
            assert model.load_weights(arriving()) == 8
        assert model.loaded == list(range(8))
        assert "load_weights" not in vars(model), "the model is as it was"
        return not watch.has_hung_up

    # A busy machine may lose half a second between two tensors, and hardly five.
    assert attempt(0.5) or attempt(5.0)


def test_an_error_goes_through_and_leaves_the_model_as_it_was() -> None:
    def arriving() -> Iterable[int]:
        yield 1
        raise KeyError("missing")

    model, watch = Model(), TrainerWatch(LONG_ENOUGH_S, pytest.fail)
    with pytest.raises(KeyError), watch, watch.noting_weights_of(model):
        model.load_weights(arriving())
    assert (model.loaded, "load_weights" in vars(model)) == ([1], False)
