"""A transfer in the worker: the rendezvous, the watch for a silent trainer, and the file of what arrives."""

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deployments.generation import worker_extension
from deployments.generation.trainer_transfer import TrainerRendezvous, TrainerWatch, TransferFile, Written
from deployments.generation.worker_extension import WeightsWorkerExtension
from rollout_client.weights.checksum import file_checksum
from rollout_client.weights.safetensors_file import header_bytes, header_of
from service.startup.config import free_port

pytestmark = pytest.mark.slow

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

    def parse_init_info(self, init_info: Any) -> Any:
        return init_info

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


def test_a_trainer_that_listens_later_is_met() -> None:
    backend, port = Backend(), free_port()
    backend.go_on.set()
    rendezvous = TrainerRendezvous(backend, InitInfo("127.0.0.1", port))
    until(lambda: rendezvous.waits_for == f"nobody listens at 127.0.0.1:{port}")
    assert not backend.calls
    with closing(socket.create_server(("127.0.0.1", port))):
        until(lambda: state_of(rendezvous) == (True, None))
    assert backend.calls == ["init"]


@pytest.mark.parametrize(("fails", "error"), [(False, None), (True, "RuntimeError: the trainer hung up")])
def test_a_connection_that_another_worker_lacks_is_closed(trainer: InitInfo, fails: bool, error: str | None) -> None:
    backend = Backend(fails)
    backend.go_on.set()
    rendezvous = TrainerRendezvous(backend, trainer)
    until(lambda: state_of(rendezvous) == (True, error))
    rendezvous.give_up()
    assert backend.calls == ["init", "shutdown"]


class Worker(WeightsWorkerExtension):
    """vLLM's worker, as far as a rendezvous needs it."""

    weight_transfer_engine: Any = object()
    vllm_config: Any = SimpleNamespace(weight_transfer_config=None)
    model_runner: Any = SimpleNamespace(get_model=object)
    device: Any = None

    def shutdown_weight_transfer_engine(self) -> None:
        """None is connected."""


def test_no_rendezvous_begins_while_a_given_up_one_goes_on(trainer: InitInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = Backend()
    factory: Any = vars(worker_extension)["WeightTransferEngineFactory"]
    monkeypatch.setattr(factory, "create_engine", lambda *_: silent)
    monkeypatch.setattr(worker_extension, "set_current_vllm_config", nullcontext)
    worker = Worker()
    assert worker.begin_rendezvous(trainer) == (None, None)
    assert silent.has_begun.wait(LONG_ENOUGH_S)
    worker.end_rendezvous(False)
    assert "an earlier rendezvous, which was given up, has not ended" in str(worker.begin_rendezvous(trainer)[1])
    silent.go_on.set()
    until(lambda: worker.rendezvous_state() == (True, None))
    assert silent.calls == ["init", "shutdown"]


HEADER = header_bytes(header_of([("a.weight", "BF16", [2, 3]), ("b.bias", "F32", [3])]).entries)
A, B = torch.arange(6.0).reshape(2, 3).bfloat16() + 0.5, torch.tensor([1.0, 2.0, 3.0])
FINE = torch.full((2, 3), 1.0 + 2**-9)


class SlowDisk(type(Path())):  # type: ignore[misc]  # the path of a file that takes nothing before `may_write`
    may_write: Event

    def write_bytes(self, data: Any) -> int:
        assert self.may_write.wait(LONG_ENOUGH_S)
        written: int = super().write_bytes(data)
        return written


def on_a_slow_disk(path: Path) -> SlowDisk:
    slow = SlowDisk(path)
    slow.may_write = Event()
    return slow


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


def test_a_trainer_does_not_wait_for_the_disk_while_there_is_room(tmp_path: Path) -> None:
    file = on_a_slow_disk(tmp_path / "file")
    weights, buffer = arriving(file), A.clone()
    for _ in range(100):
        weights.add("a.weight", buffer)
    buffer.zero_()
    weights.add("b.bias", B)
    assert not file.exists()
    file.may_write.set()
    assert ended(weights) == ((file_checksum(file), file.stat().st_size), None)
    assert torch.equal(load_file(file)["a.weight"], A), "as it arrived"


def test_without_room_a_tensor_waits_until_there_is_some(tmp_path: Path) -> None:
    file = on_a_slow_disk(tmp_path / "file")
    weights = TransferFile(file, HEADER, torch.bfloat16, room_bytes=len(HEADER))
    adding = Thread(target=weights.add, args=("a.weight", A))
    adding.start()
    adding.join(0.2)
    assert adding.is_alive()
    file.may_write.set()
    adding.join(LONG_ENOUGH_S)
    assert not adding.is_alive()
    weights.add("b.bias", B)
    assert ended(weights)[1] is None


def test_values_are_cast_as_the_engine_casts_them(tmp_path: Path) -> None:
    weights = arriving(tmp_path / "file")
    weights.add("a.weight", FINE)
    weights.add("b.bias", B.bfloat16())
    assert ended(weights)[1] is None
    file = load_file(tmp_path / "file")
    assert torch.equal(file["a.weight"], FINE.bfloat16())
    assert torch.equal(file["b.bias"], B)


@pytest.mark.parametrize(
    ("name", "tensor", "engine_dtype", "error"),
    [
        ("c", A, torch.bfloat16, r"the checkpoint has no tensor c of the shape \[2, 3\]"),
        ("a.weight", A.T, torch.bfloat16, r"the checkpoint has no tensor a\.weight of the shape \[3, 2\]"),
        ("a.weight", FINE, torch.float16, r"a\.weight is torch\.float32, which the checkpoint's BF16 cannot hold"),
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
    assert str(ended(weights)[1]).startswith("FileNotFoundError: ")


def test_nothing_stays_of_a_transfer_that_broke_off(tmp_path: Path) -> None:
    weights = arriving(tmp_path / "file")
    weights.add("a.weight", A)
    weights.discard()
    assert list(tmp_path.iterdir()) == []


class Model:
    def load_weights(self, weights: Iterable[Any]) -> list[Any]:
        return list(weights)


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


def test_each_tensor_counts_as_a_sign_of_life() -> None:
    """The whole takes longer than the limit, and no tensor does."""

    def attempt(limit_s: float) -> bool:
        def arriving() -> Iterable[int]:
            for number in range(8):
                time.sleep(limit_s / 5)
                yield number

        model, seen = Model(), list[Any]()
        with TrainerWatch(limit_s, lambda: None) as watch, watch.noting_weights_of(model, seen.append):
            loaded = model.load_weights(arriving())
        assert seen == loaded == list(range(8))
        assert "load_weights" not in vars(model), "the model is as it was"
        return not watch.has_hung_up

    # A busy machine may lose half a second between two tensors, and hardly five.
    assert attempt(0.5) or attempt(5.0)
