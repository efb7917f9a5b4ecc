"""Expired and discarded files are removed, and a disk that fails for a while ends nothing."""

import asyncio
from pathlib import Path

import pytest

from deployments.policy.versions.housekeeping import ExpiringFiles, Housekeeping, Trash
from tests import virtual_time
from tests.virtual_time import now, run, settled, until


class ScriptedFiles(ExpiringFiles):
    """Expire at `times`; the first `failures` looks fail."""

    def __init__(self, *times: float, failures: int = 0) -> None:
        self.times = list(times)
        self.failures = failures
        self.dropped: list[float] = []
        """When."""

    def drop_expired(self) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the disk is gone")
        self.dropped += [now() for time in self.times if time <= now()]
        self.times = [time for time in self.times if time > now()]

    def next_expiry_s(self) -> float | None:
        return min(self.times) - now() if self.times else None


@virtual_time.test
async def test_uploads_are_dropped_when_they_expire(tmp_path: Path) -> None:
    files = ScriptedFiles(10.0, 40.0)
    running = asyncio.create_task(Housekeeping(Trash(tmp_path)).run(files))
    await until(lambda: not files.times)
    assert files.dropped == [10.0, 40.0]
    running.cancel()


@virtual_time.test
async def test_what_was_discarded_is_deleted_when_the_housekeeping_is_woken(tmp_path: Path) -> None:
    housekeeping = Housekeeping(Trash(tmp_path))
    running = asyncio.create_task(housekeeping.run(ScriptedFiles()))
    await settled()
    (tmp_path / "file").write_bytes(b"weights")
    Trash(tmp_path).discard(tmp_path / "file")
    [discarded] = (tmp_path / "removing").iterdir()
    housekeeping.wake()
    await until(lambda: not discarded.exists())
    running.cancel()


def test_a_disk_that_fails_is_tried_again_after_a_minute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        files = ScriptedFiles(10.0, failures=2)
        running = asyncio.create_task(Housekeeping(Trash(tmp_path)).run(files))
        await until(lambda: not files.times)
        assert files.dropped == [120.0]
        running.cancel()

    run(story())
    assert [record.getMessage() for record in caplog.records] == ["Files of the policy store could not be removed."] * 2
