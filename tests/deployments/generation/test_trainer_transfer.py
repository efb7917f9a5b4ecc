"""A transfer in the worker: the rendezvous, the watch for a silent trainer, and the file of what arrives."""

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deployments.generation.trainer_transfer import TrainerRendezvous, TrainerWatch, TransferFile, Written
from deployments.generation.worker_extension import WeightsWorkerExtension
from rollout_client.weights.checksum import file_checksum
from rollout_client.weights.safetensors_file import header_bytes, header_of
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


def state_of(rendezvous: TrainerRendezvous) -> tuple[bool, str | None]:
    return rendezvous.has_ended, rendezvous.error


def test_the_connection_is_there_when_the_rendezvous_has_ended(trainer: InitInfo) -> None:
    backend = Backend()
    rendezvous = TrainerRendezvous(backend, trainer)
    assert backend.has_begun.wait(LONG_ENOUGH_S)
    assert (state_of(rendezvous), rendezvous.waits_for) == ((False, None), "the trainer does not answer")
    backend.go_on.set()
    until(lambda: state_of(rendezvous) == (True, None))
    assert rendezvous.engine is backend
    assert backend.calls == ["init"]


def test_a_rendezvous_that_fails_says_why(trainer: InitInfo) -> None:
    backend = Backend(fails=True)
    backend.go_on.set()
    rendezvous = TrainerRendezvous(backend, trainer)
    until(lambda: state_of(rendezvous) == (True, "RuntimeError: the trainer hung up"))


def test_where_nobody_listens_vllm_does_not_begin_and_giving_up_ends_the_thread() -> None:
    backend, port = Backend(), free_port()
    rendezvous = TrainerRendezvous(backend, InitInfo("127.0.0.1", port))
    until(lambda: rendezvous.waits_for == f"nobody listens at 127.0.0.1:{port}")
    rendezvous.give_up()
    until(lambda: rendezvous.has_ended)
    assert "init" not in backend.calls


def test_a_trainer_that_listens_later_is_met() -> None:
    backend, port = Backend(), free_port()
    backend.go_on.set()
    rendezvous = TrainerRendezvous(backend, InitInfo("127.0.0.1", port))
    until(lambda: rendezvous.waits_for.startswith("nobody listens"))
    with closing(socket.create_server(("127.0.0.1", port))):
        until(lambda: state_of(rendezvous) == (True, None))
    assert backend.calls == ["init"]


def test_a_connection_that_comes_after_it_was_given_up_is_closed(trainer: InitInfo) -> None:
    backend = Backend()
    rendezvous = TrainerRendezvous(backend, trainer)
    assert backend.has_begun.wait(LONG_ENOUGH_S)
    rendezvous.give_up()
    assert backend.calls == ["init"], "vLLM's rendezvous cannot be interrupted"
    backend.go_on.set()
    until(lambda: rendezvous.has_ended)
    assert backend.calls == ["init", "shutdown"]


def test_a_connection_that_is_given_up_because_another_worker_has_none_is_closed(trainer: InitInfo) -> None:
    backend = Backend()
    backend.go_on.set()
    rendezvous = TrainerRendezvous(backend, trainer)
    until(lambda: rendezvous.has_ended)
    rendezvous.give_up()
    assert backend.calls == ["init", "shutdown"]


def test_no_rendezvous_begins_while_vllm_goes_on_with_one_that_was_given_up(trainer: InitInfo) -> None:
    silent = Backend()
    worker: Any = WeightsWorkerExtension()
    worker.weight_transfer_engine = object()
    worker._rendezvous = TrainerRendezvous(silent, trainer)
    assert silent.has_begun.wait(LONG_ENOUGH_S)
    worker.end_rendezvous(False)
    _, error = worker.begin_rendezvous({})
    assert "an earlier rendezvous, which was given up, has not ended" in error
    silent.go_on.set()
    until(lambda: worker._rendezvous.has_ended)
    assert silent.calls == ["init", "shutdown"]


HEADER = header_bytes(header_of([("a.weight", "BF16", [2, 3]), ("b.bias", "F32", [3])]).entries)
A, B = torch.arange(6.0).reshape(2, 3).bfloat16() + 0.5, torch.tensor([1.0, 2.0, 3.0])


def arriving(path: Path, engine_dtype: torch.dtype = torch.bfloat16) -> TransferFile:
    return TransferFile(path, HEADER, engine_dtype)


def ended(weights: TransferFile) -> tuple[Written | None, str | None]:
    until(lambda: weights.written() != (None, None))
    return weights.written()


def test_all_tensors_make_a_file_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "transfer.safetensors"
    path.write_bytes(b"an earlier one, which was longer" * 100)
    weights = arriving(path)
    weights.add("b.bias", B)
    weights.add("a.weight", torch.zeros(2, 3).bfloat16())
    weights.add("a.weight", A)
    assert ended(weights) == ((file_checksum(path), path.stat().st_size), None)
    file = load_file(path)
    assert list(file) == ["a.weight", "b.bias"]
    assert torch.equal(file["a.weight"], A)
    assert torch.equal(file["b.bias"], B)


def test_the_trainer_does_not_wait_for_the_disk_while_there_is_room_in_memory(tmp_path: Path) -> None:
    weights, may_write = arriving(tmp_path / "file"), Event()
    weights._thread.submit(may_write.wait, LONG_ENOUGH_S)
    for _ in range(100):
        weights.add("a.weight", A)
    weights.add("b.bias", B)
    until((tmp_path / "file").exists)
    assert A.view(torch.uint8).numpy().tobytes() not in (tmp_path / "file").read_bytes()
    may_write.set()
    assert ended(weights) == ((file_checksum(tmp_path / "file"), (tmp_path / "file").stat().st_size), None)


def test_without_room_a_tensor_waits_until_the_one_before_is_written(tmp_path: Path) -> None:
    weights, may_write = TransferFile(tmp_path / "file", HEADER, torch.bfloat16, room_bytes=0), Event()
    weights._thread.submit(may_write.wait, LONG_ENOUGH_S)
    weights.add("a.weight", A)
    second = Thread(target=weights.add, args=("b.bias", B))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    may_write.set()
    second.join(LONG_ENOUGH_S)
    assert not second.is_alive()
    assert ended(weights)[1] is None


def test_what_changes_after_it_has_arrived_is_in_the_file_as_it_arrived(tmp_path: Path) -> None:
    weights, buffer, may_write = arriving(tmp_path / "file"), A.clone(), Event()
    weights._thread.submit(may_write.wait, LONG_ENOUGH_S)
    weights.add("a.weight", buffer)
    buffer.zero_()
    weights.add("b.bias", B)
    may_write.set()
    assert ended(weights)[1] is None
    assert torch.equal(load_file(tmp_path / "file")["a.weight"], A)


def test_values_are_cast_as_the_engine_casts_them(tmp_path: Path) -> None:
    weights, sent = arriving(tmp_path / "file"), torch.full((2, 3), 1.0 + 2**-9)
    weights.add("a.weight", sent)
    weights.add("b.bias", B.bfloat16())
    assert ended(weights)[1] is None
    file = load_file(tmp_path / "file")
    assert torch.equal(file["a.weight"], sent.bfloat16())
    assert torch.equal(file["b.bias"], B)


@pytest.mark.parametrize(
    ("name", "tensor", "engine_dtype", "error"),
    [
        ("c", A, torch.bfloat16, r"the checkpoint has no tensor c of the shape \[2, 3\]"),
        ("a.weight", A.T, torch.bfloat16, r"the checkpoint has no tensor a\.weight of the shape \[3, 2\]"),
        (
            "a.weight",
            torch.full((2, 3), 1.0 + 2**-9),
            torch.float16,
            r"a\.weight is torch\.float32, which the checkpoint's BF16 cannot hold",
        ),
        ("b.bias", B, torch.bfloat16, r"1 of 2 tensors were not sent, as a\.weight"),
    ],
)
def test_what_is_not_the_checkpoint_is_told_at_the_end(
    tmp_path: Path, name: str, tensor: torch.Tensor, engine_dtype: torch.dtype, error: str
) -> None:
    weights = arriving(tmp_path / "file", engine_dtype)
    weights.add(name, tensor)
    weights.add("b.bias", B)
    with pytest.raises(AssertionError, match=f"^ValueError: {error}$"):
        raise AssertionError(ended(weights)[1])
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_told_at_the_end(tmp_path: Path) -> None:
    weights = arriving(tmp_path / "missing" / "file")
    weights.add("a.weight", A)
    error = ended(weights)[1]
    assert error is not None
    assert error.startswith("FileNotFoundError: ")


def test_nothing_stays_of_a_transfer_that_broke_off(tmp_path: Path) -> None:
    weights = arriving(tmp_path / "file")
    weights.add("a.weight", A)
    weights.discard()
    assert list(tmp_path.iterdir()) == []


class Model:
    def __init__(self) -> None:
        self.loaded: list[Any] = []
        self.seen: list[Any] = []

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
        with TrainerWatch(limit_s, lambda: None) as watch, watch.noting_weights_of(model, model.seen.append):
            assert model.load_weights(arriving()) == 8
        assert (model.seen, model.loaded) == (list(range(8)), list(range(8)))
        assert "load_weights" not in vars(model), "the model is as it was"
        return not watch.has_hung_up

    # A busy machine may lose half a second between two tensors, and hardly five.
    assert attempt(0.5) or attempt(5.0)


def test_an_error_goes_through_and_leaves_the_model_as_it_was() -> None:
    def arriving() -> Iterable[int]:
        yield 1
        raise KeyError("missing")

    model, watch = Model(), TrainerWatch(LONG_ENOUGH_S, pytest.fail)
    with pytest.raises(KeyError), watch, watch.noting_weights_of(model, model.seen.append):
        model.load_weights(arriving())
    assert (model.seen, "load_weights" in vars(model)) == ([1], False)
