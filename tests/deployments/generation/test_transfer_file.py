"""What arrives is in the file as the engine has loaded it, or the reason is told; the transfer goes on."""

import time
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import load_file

from deployments.generation.trainer_transfer import TransferFile, Written
from rollout_client.weights.checksum import file_checksum

LAYOUT = {"a.weight": ("BF16", [2, 3]), "b.bias": ("F32", [3])}
A, B = torch.arange(6.0).reshape(2, 3).bfloat16() + 0.5, torch.tensor([1.0, 2.0, 3.0])
LONG_ENOUGH_S = 40.0


def arriving(path: Path, engine_dtype: torch.dtype = torch.bfloat16) -> TransferFile:
    return TransferFile(path, LAYOUT, engine_dtype)


def ended(weights: TransferFile) -> tuple[Written | None, str | None]:
    weights.end()
    deadline = time.monotonic() + LONG_ENOUGH_S
    while weights.state() == (None, None):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return weights.state()


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
        ("c", A, torch.bfloat16, "the checkpoint has no tensor c"),
        ("a.weight", A.T, torch.bfloat16, r"a\.weight has the shape \[3, 2\]; the checkpoint's is \[2, 3\]"),
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
    with pytest.raises(AssertionError, match=f"^OtherTensors: {error}$"):
        raise AssertionError(ended(weights)[1])


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
    assert ended(weights) == (None, "OtherTensors: the transfer broke off")
    assert list(tmp_path.iterdir()) == []
