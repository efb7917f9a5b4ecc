"""The keys file: read anew when it changes, and kept when it cannot be read."""

import asyncio
import json
import logging
import os
from pathlib import Path

import pytest

from service.access.access_control import CHECK_PERIOD_S, KeysNotReadable, _KeyFile
from service.access.keys import hash_of, new_key

OLD, NEW = new_key(), new_key()


class WatchedFile:
    """A keys file, what it lets in, and the clock that it is read by."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.json"
        self.write(OLD)
        self.now_s = 0.0
        self.keys = _KeyFile(self.path, lambda: self.now_s)

    def write(self, *keys: str) -> None:
        entries = [{"name": "team", "sha256": hash_of(key), "scopes": ["read"]} for key in keys]
        self.path.write_text(json.dumps({"keys": entries}))

    def lets_in(self, after_s: float = CHECK_PERIOD_S) -> list[bool]:
        """Whether the old key and the new one are valid `after_s` seconds later."""
        self.now_s += after_s
        ring = asyncio.run(self.keys.keys())
        return [ring.caller_with(key) is not None for key in (OLD, NEW)]


@pytest.fixture
def file(tmp_path: Path) -> WatchedFile:
    return WatchedFile(tmp_path)


def test_a_key_is_rotated_through_a_time_in_which_both_are_valid(file: WatchedFile) -> None:
    assert file.lets_in() == [True, False]
    file.write(OLD, NEW)
    assert file.lets_in() == [True, True]
    file.write(NEW)
    assert file.lets_in() == [False, True]


def test_a_change_takes_effect_with_the_next_check(file: WatchedFile) -> None:
    file.write(NEW)
    assert file.lets_in(after_s=CHECK_PERIOD_S / 2) == [True, False]
    assert file.lets_in(after_s=CHECK_PERIOD_S / 2) == [False, True]


def test_a_change_of_equal_size_within_one_tick_of_the_clock_is_noticed(file: WatchedFile) -> None:

    before = file.path.stat()
    file.write(NEW)
    os.utime(file.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.path.stat().st_size == before.st_size
    assert file.lets_in() == [False, True]


@pytest.mark.parametrize("broken", [b'{"keys": [', b"", b'{"keys": [{"name": "team"}]}', None])
def test_a_file_that_cannot_be_used_keeps_the_last_keys_and_is_logged_once(
    file: WatchedFile, broken: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    if broken is None:
        file.path.unlink()
    else:
        file.path.write_bytes(broken)
    assert [file.lets_in() for _ in range(3)] == [[True, False]] * 3
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert errors[0].getMessage().startswith("The keys file cannot be used, its last keys stay valid: ")
    file.write(NEW)
    assert file.lets_in() == [False, True]


async def test_requests_of_one_moment_read_it_once(file: WatchedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write(NEW)
    file.now_s += CHECK_PERIOD_S
    reads = 0
    read_bytes = Path.read_bytes

    def counted(path: Path) -> bytes:
        nonlocal reads
        reads += 1
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    rings = await asyncio.gather(*(file.keys.keys() for _ in range(50)))
    assert [ring.caller_with(NEW) is not None and ring.caller_with(OLD) is None for ring in rings] == [True] * 50
    assert reads == 1


def test_a_service_does_not_start_without_its_keys_file(tmp_path: Path) -> None:
    with pytest.raises(KeysNotReadable, match=r"access\.keys_file: No such file or directory \(.*none\.yaml\)"):
        _KeyFile(tmp_path / "none.yaml")
    (tmp_path / "wrong.yaml").write_text("keys: 1")
    with pytest.raises(KeysNotReadable, match=r"access\.keys_file: keys: Input should be a valid list"):
        _KeyFile(tmp_path / "wrong.yaml")
