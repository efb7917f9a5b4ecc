"""Fetching one file: which source gives which range, and sources that fail."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.policy import node_files
from deployments.policy.node_files import (
    READ_TIMEOUT_S,
    READS_IN_FLIGHT,
    WeightsNotFetched,
    fetch_file,
    read_range,
)
from tests.deployments.policy.policy_world import a_payload
from tests.deployments.policy.scripted_sources import ScriptedSource
from tests.virtual_time import now, run

RANGE = 10
CONTENT = Random(0).randbytes(95)


@pytest.fixture(autouse=True, scope="module")
def short_ranges() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_files, "READ_BYTES", RANGE)
        yield


def fetched(
    folder: Path, *sources: ScriptedSource, content: bytes = CONTENT, check: Callable[[], None] | None = None
) -> bytes:
    path = folder / "fetched"

    async def play() -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            await fetch_file(replace(a_payload(7), size_bytes=len(content)), sources, descriptor)
        finally:
            os.close(descriptor)
            if check is not None:
                check()

    run(play())
    return path.read_bytes()


def test_the_sources_take_turns_and_each_range_is_read_once(tmp_path: Path) -> None:
    sources = [ScriptedSource(CONTENT), ScriptedSource(CONTENT)]
    assert fetched(tmp_path, *sources) == CONTENT
    assert [source.offsets for source in sources] == [[0, 20, 40, 60, 80], [10, 30, 50, 70, 90]]


def test_a_bounded_number_of_ranges_is_read_at_a_time(tmp_path: Path) -> None:
    source = ScriptedSource(CONTENT)
    fetched(tmp_path, source)
    assert source.most_reading == READS_IN_FLIGHT


@pytest.mark.parametrize("content", [b"", b"a", CONTENT[:RANGE], CONTENT[: RANGE + 1]])
def test_files_of_any_length_are_fetched(tmp_path: Path, content: bytes) -> None:
    assert fetched(tmp_path, ScriptedSource(content), content=content) == content


def test_a_source_that_dies_is_passed_over_and_what_it_gave_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dies, lives = ScriptedSource(CONTENT, "the replica r1", fails_after=2), ScriptedSource(CONTENT)
    assert fetched(tmp_path, dies, lives) == CONTENT
    given = dies.offsets[:2]
    assert sorted([*given, *lives.offsets]) == list(range(0, 95, RANGE))
    assert {record.getMessage() for record in caplog.records} == {"Weights are fetched without the replica r1: it died"}


def test_a_silent_source_is_passed_over_after_its_time(tmp_path: Path) -> None:
    times: list[float] = []
    silent = ScriptedSource(CONTENT, hangs=True)
    assert fetched(tmp_path, silent, ScriptedSource(CONTENT), check=lambda: times.append(now())) == CONTENT
    assert times == [READ_TIMEOUT_S]


def test_a_source_with_a_shorter_file_is_passed_over(tmp_path: Path) -> None:
    assert fetched(tmp_path, ScriptedSource(CONTENT[:25]), ScriptedSource(CONTENT)) == CONTENT


def test_without_a_source_that_works_the_failure_names_the_last_one(tmp_path: Path) -> None:
    sources = [
        ScriptedSource(CONTENT, "the replica r1", fails_after=0),
        ScriptedSource(CONTENT, "the store", version=8),
    ]
    with pytest.raises(
        WeightsNotFetched, match=r"^The weights of version 7 could not be fetched: the store: it does not"
    ):
        fetched(tmp_path, *sources)


def test_a_full_disk_ends_the_fetch_with_its_own_error() -> None:
    async def play() -> None:
        descriptor = os.open("/dev/full", os.O_WRONLY)
        try:
            await fetch_file(replace(a_payload(7), size_bytes=95), [ScriptedSource(CONTENT)], descriptor)
        finally:
            os.close(descriptor)

    with pytest.raises(OSError, match="No space left"):
        run(play())


@given(deaths=st.lists(st.integers(0, 12), min_size=0, max_size=4), size=st.integers(0, 130))
def test_as_long_as_one_source_lives_the_file_is_whole(
    tmp_path_factory: pytest.TempPathFactory, deaths: list[int], size: int
) -> None:
    content = Random(size).randbytes(size)
    mortal = [ScriptedSource(content, f"r{number}", fails_after=reads) for number, reads in enumerate(deaths)]
    folder = tmp_path_factory.mktemp("fetched")
    assert fetched(folder, *mortal, ScriptedSource(content), content=content) == content


@pytest.mark.parametrize(
    ("offset", "count", "expected"), [(0, 4, b"abcd"), (2, 3, b"cde"), (4, 10, b"ef"), (6, 1, b""), (9, 1, b"")]
)
def test_a_range_ends_at_the_end_of_the_file(tmp_path: Path, offset: int, count: int, expected: bytes) -> None:
    (tmp_path / "file").write_bytes(b"abcdef")
    assert read_range(tmp_path / "file", offset, count) == expected
