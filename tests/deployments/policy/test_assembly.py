"""Full weights as one file: of zstd streams, checkpoints, adapters and partial weights."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from safetensors.torch import load_file, save

from deployments.policy.assembly import (
    unpack_zstd,
    write_adapter,
    write_checkpoint,
    write_completed,
)
from deployments.policy.weight_checks import validate_full
from rollout_client.weights.checksum import file_checksum
from rollout_client.weights.safetensors_file import read_header
from tests.deployments.policy.weight_files import GOOD, LAYOUT, Bomb, adapter, refusal, written


def test_a_folder_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    message = f"{tmp_path} holds no adapter_model.safetensors: save the adapter with save_pretrained of PEFT"
    assert refusal(write_adapter, tmp_path, tmp_path / "packed") == [("weights", message)]
    adapter(tmp_path, "{")
    [(field, said)] = refusal(write_adapter, tmp_path, tmp_path / "packed")
    assert (field, said.startswith(f"{tmp_path / 'adapter_config.json'} is not JSON: ")) == ("weights", True)


def test_partial_weights_take_the_place_of_those_of_the_base(tmp_path: Path) -> None:
    base = written(tmp_path / "base", GOOD)
    new = {"norm.weight": torch.zeros(3, dtype=torch.bfloat16)}
    write_completed(base, written(tmp_path / "partial", new), tmp_path / "full")
    assert validate_full(tmp_path / "full", LAYOUT) == file_checksum(written(tmp_path / "expected", GOOD | new))


def test_a_base_of_partial_weights_that_was_removed_meanwhile_asks_for_full_weights(tmp_path: Path) -> None:
    partial = written(tmp_path / "partial", {"scale": GOOD["scale"]})
    message = "newer versions have taken the place of the base; send full weights"
    assert refusal(write_completed, tmp_path / "base", partial, tmp_path / "full") == [("base", message)]


@pytest.mark.parametrize("frames", [1, 3])
def test_what_was_packed_is_unpacked(tmp_path: Path, frames: int) -> None:
    content = np.random.default_rng(0).bytes(100_000)
    parts = [
        content[len(content) * number // frames : len(content) * (number + 1) // frames] for number in range(frames)
    ]
    (tmp_path / "packed").write_bytes(b"".join(zstandard.compress(part) for part in parts))
    unpack_zstd(tmp_path / "packed", tmp_path / "a", len(content))
    assert (tmp_path / "a").read_bytes() == content


def test_a_small_stream_that_unpacks_to_a_large_file_is_refused_before_it_is_one(tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(zstandard.compress(bytes(2**26)))
    [(field, message)] = refusal(unpack_zstd, tmp_path / "packed", tmp_path / "a", 2**20)
    assert (field, "more than 1048576 bytes" in message) == ("weights", True)
    assert (tmp_path / "a").stat().st_size <= 2**20


@pytest.mark.parametrize(("window_log", "is_read"), [(27, True), (28, False)])
def test_a_stream_that_asks_for_too_much_memory_is_refused(tmp_path: Path, window_log: int, is_read: bool) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, write_content_size=False)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "packed").write_bytes(compressor.compress(b"content") + compressor.flush())
    if is_read:
        unpack_zstd(tmp_path / "packed", tmp_path / "a", 2**30)
        assert (tmp_path / "a").read_bytes() == b"content"
    else:
        [(field, message)] = refusal(unpack_zstd, tmp_path / "packed", tmp_path / "a", 2**30)
        assert (field, "too much memory" in message) == ("weights", True)


def test_what_is_not_packed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(save(GOOD))
    [(field, message)] = refusal(unpack_zstd, tmp_path / "packed", tmp_path / "a", 2**30)
    assert (field, "the bytes are not a zstd stream, as Content-Encoding says" in message) == ("weights", True)


@pytest.mark.parametrize("kept", [0, 10, -1])
def test_a_stream_that_was_cut_off_is_refused_at_last(tmp_path: Path, kept: int) -> None:
    (tmp_path / "packed").write_bytes(zstandard.compress(save(GOOD))[:kept])

    def unpacked_and_checked() -> None:
        unpack_zstd(tmp_path / "packed", tmp_path / "a", 2**30)
        validate_full(tmp_path / "a", LAYOUT)

    assert refusal(unpacked_and_checked)[0][0] == "weights"


def test_a_sharded_checkpoint_becomes_one_file_that_transformers_reads(roots: Path, tmp_path: Path) -> None:
    folder = roots / "sharded"
    written(folder / "b.safetensors", {"scale": GOOD["scale"]})
    written(folder / "a.safetensors", {name: GOOD[name] for name in ("norm.weight", "embed.weight")})
    write_checkpoint(folder, tmp_path / "full")
    loaded = load_file(tmp_path / "full")
    assert {name: value.tolist() for name, value in loaded.items()} == {
        name: value.tolist() for name, value in GOOD.items()
    }
    assert read_header(tmp_path / "full").entries[0].begin == 0


def test_a_folder_with_only_pickles_is_refused_and_none_of_them_read(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    expected = [("weights", f"{tmp_path / 'step'} holds no .safetensors file")]
    assert refusal(write_checkpoint, tmp_path / "step", tmp_path / "full") == expected
    file = tmp_path / "step" / "pytorch_model.bin"
    expected = [("weights", f"{file} is a pickle or an archive: save the weights as safetensors")]
    assert refusal(write_checkpoint, file, tmp_path / "full") == expected


@pytest.mark.parametrize("name", ["../step-1/model.safetensors", "/etc/hosts", "deeper/a.safetensors"])
def test_an_index_that_leads_out_of_its_folder_is_refused(roots: Path, tmp_path: Path, name: str) -> None:
    folder = roots / "step-2"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    [(field, message)] = refusal(write_checkpoint, folder, tmp_path / "full")
    assert (field, f"{name} does not lie in the folder" in message) == ("weights", True)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        written(tmp_path / "step" / f"{name}.safetensors", GOOD)
    [(field, message)] = refusal(write_checkpoint, tmp_path / "step", tmp_path / "full")
    assert (field, "and so does another file" in message) == ("weights", True)
