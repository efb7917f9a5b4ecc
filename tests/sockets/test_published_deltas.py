"""Disk deltas that miles' own writer has published, taken by a store that follows its folder.

`delta_program.py` runs the writer, from the sources that `trainer_sources.py` fetches.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file

from tests.deployments.policy.policy_world import NORM, World, content_of
from tests.deployments.policy.test_folder_follower import followed, same_tensors, state_of, until_current, until_waiting
from tests.paths import TINY_MODEL

PROGRAM = Path(__file__).with_name("delta_program.py")
MILES = Path(os.environ["ROLLOUT_TRAINERS"], "miles")
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not MILES.is_dir(), reason="the sources of miles could not be fetched: TRAINERS_FROM names clones"
    ),
]
VERSIONS = 3


def trained(folder: Path) -> list[Path]:
    """The weights of each version: every tensor changes a little, and one not at all in the last step."""
    files, tensors = [], load_file(TINY_MODEL / "model.safetensors")
    for version in range(1, VERSIONS + 1):
        drawn = torch.Generator().manual_seed(version)
        for name, tensor in tensors.items():
            if name != NORM or version < VERSIONS:
                noise = torch.randn(tensor.shape, generator=drawn) * 1e-2
                tensors[name] = (tensor.float() + noise).to(tensor.dtype)
        files.append(folder / f"{version}.safetensors")
        save_file(tensors, files[-1])
    return files


def published(folder: Path, encoding: str, checksum: str) -> list[bytes]:
    """Publishes the versions, and returns the weights of each."""
    versions = trained(folder.parent)
    job = {
        "checkpoint": str(TINY_MODEL),
        "versions": [str(file) for file in versions],
        "folder": str(folder),
        "encoding": encoding,
        "checksum": checksum,
    }
    asked = folder.with_suffix(".job")
    asked.write_text(json.dumps(job))
    env = os.environ | {"PYTHONPATH": str(MILES)}
    done = subprocess.run([sys.executable, PROGRAM, asked], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [file.read_bytes() for file in versions]


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
def test_the_deltas_that_miles_writes_become_the_weights(tmp_path: Path, encoding: str, checksum: str) -> None:
    @followed(model=TINY_MODEL)
    async def story(world: World, folder: Path) -> None:
        replica = await world.ready("one")
        contents = published(folder, encoding, checksum)
        await until_current(world, VERSIONS)
        assert same_tensors(content_of(replica.staged), contents[-1])
        assert (await state_of(world)).refused == []

    story(tmp_path)


def test_a_flipped_bit_in_a_delta_is_refused_and_later_versions_wait(tmp_path: Path) -> None:
    @followed(model=TINY_MODEL)
    async def story(world: World, folder: Path) -> None:
        replica = await world.ready("one")
        beside = folder.with_name("beside")
        contents = published(beside, "xor", "xxh3-128")
        [file] = (beside / "weight_v000002").glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        # All versions appear at once.
        beside.replace(folder)
        await until_current(world, 1)
        await until_waiting(world, "version 3 needs version 2")
        assert load(content_of(replica.staged)).keys() == load(contents[0]).keys()
        assert same_tensors(content_of(replica.staged), contents[0])

    story(tmp_path)
