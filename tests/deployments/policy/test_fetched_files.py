"""Fetching one file from the policy store: which ranges are read, and reads that fail."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.policy import node_files
from deployments.policy.node_files import READ_TIMEOUT_S, READS_IN_FLIGHT, NodeWeights, WeightsNotFetched
from deployments.storage.storage import AWAY_S
from tests.deployments.policy.policy_world import a_payload
from tests.deployments.policy.scripted_reads import ScriptedReads
from tests.virtual_time import now, run

RANGE = 10
CONTENT = Random(0).randbytes(95)


@pytest.fixture(autouse=True, scope="module")
def short_ranges() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_files, "READ_BYTES", RANGE)
        patch.setattr(node_files, "file_checksum", lambda _: "checksum")
        yield


def fetched(folder: Path, source: ScriptedReads, size: int | None = None, after_s: float = 0.0) -> bytes:
    """The file that a node has fetched, or the failure `after_s` seconds."""
    node = NodeWeights(folder / "node", "another", source.read)
    node.join()
    payload = replace(a_payload(7), size_bytes=len(source.content) if size is None else size)

    async def play() -> bytes:
        try:
            return (await node.file_of(payload)).path.read_bytes()
        finally:
            assert now() == after_s
            left = await asyncio.to_thread(os.listdir, folder / "node" / "versions")
            assert not [name for name in left if name.endswith(".fetching")]

    return run(play())


def test_each_range_is_read_once_and_a_bounded_number_at_a_time(tmp_path: Path) -> None:
    source = ScriptedReads(CONTENT)
    assert fetched(tmp_path, source) == CONTENT
    assert (source.offsets, source.most_reading) == (list(range(0, 95, RANGE)), READS_IN_FLIGHT)


@given(size=st.integers(0, 130))
def test_files_of_any_length_are_fetched(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    content = Random(size).randbytes(size)
    assert fetched(tmp_path_factory.mktemp("fetched"), ScriptedReads(content)) == content


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (ScriptedReads(CONTENT, fails_after=2), "it died"),
        (ScriptedReads(CONTENT, version=8), "version: it is not stored here, or no longer"),
        (ScriptedReads(CONTENT[:25]), "5 bytes came in place of 10"),
    ],
)
def test_a_store_that_cannot_give_a_range_fails_the_fetch(tmp_path: Path, source: ScriptedReads, reason: str) -> None:
    with pytest.raises(WeightsNotFetched, match=f"^The weights of version 7 could not be fetched: {reason}"):
        fetched(tmp_path, source, size=95)


def test_a_silent_store_fails_the_fetch_after_its_time(tmp_path: Path) -> None:
    with pytest.raises(WeightsNotFetched, match="nothing came for 60 s"):
        fetched(tmp_path, ScriptedReads(CONTENT, hangs=True), after_s=READ_TIMEOUT_S)


def test_a_fetch_outlives_a_restart_of_the_store(tmp_path: Path) -> None:
    source = ScriptedReads(CONTENT, lost=range(2, 10))
    assert fetched(tmp_path, source, after_s=1.0) == CONTENT
    assert len(source.offsets) == 10 + 8


def test_a_store_that_stays_away_fails_the_fetch(tmp_path: Path) -> None:
    with pytest.raises(WeightsNotFetched, match="The policy store died during the call"):
        fetched(tmp_path, ScriptedReads(CONTENT, lost=range(2, 10_000)), after_s=AWAY_S)


def test_a_full_disk_ends_the_fetch_with_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> int:
        raise OSError("No space left")

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(OSError, match="No space left"):
        fetched(tmp_path, ScriptedReads(CONTENT))
