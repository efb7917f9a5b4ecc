from pathlib import Path

import pytest

from deployments.policy.replicas.file_fetch import read_range


@pytest.mark.parametrize(
    ("offset", "count", "expected"), [(0, 4, b"abcd"), (2, 3, b"cde"), (4, 10, b"ef"), (6, 1, b""), (9, 1, b"")]
)
def test_a_range_ends_at_the_end_of_the_file(tmp_path: Path, offset: int, count: int, expected: bytes) -> None:
    (tmp_path / "file").write_bytes(b"abcdef")
    assert read_range(tmp_path / "file", offset, count) == expected
