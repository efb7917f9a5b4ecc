"""Whose shared memory is whose, and what is freed."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from deployments.workers.cleanup import (
    MARK,
    OWNER_VARIABLE,
    claim_folder,
    free_left_over,
    has_died,
    owner_of,
    remove_left_over,
)


def owner_that_is_gone() -> str:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        owner = owner_of(process.pid)
        assert not has_died(owner)
        process.communicate(b"\n")
    return owner


def test_what_a_dead_replica_left_is_freed_and_all_else_stays(tmp_path: Path) -> None:
    gone, here = owner_that_is_gone(), owner_of(os.getpid())
    elsewhere = "1-2-3"
    left = [f"{MARK}-{gone}-1f", f"sem.{MARK}-{gone}-_a1b"]
    others = [f"{MARK}-{here}-1f", f"sem.{MARK}-{here}-_a1b", f"{MARK}-{elsewhere}-1f", "psm_1f", "sem.mp-1f"]
    for name in [*left, *others]:
        (tmp_path / name).touch()

    free_left_over(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == set(others)


def test_a_killed_replicas_folder_goes_and_all_else_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.workers.cleanup.LONGEST_ADDRESS", 1000)
    # Fork servers of this process shall not have their sockets there.
    told: dict[str, str] = {}
    monkeypatch.setattr("deployments.workers.cleanup.current_process", lambda: SimpleNamespace(_config=told))
    gone, elsewhere = tmp_path / f"{MARK}-{owner_that_is_gone()}", tmp_path / f"{MARK}-1-2-3"
    for folder in (gone, elsewhere):
        folder.mkdir()
        (folder / "socket").touch()

    own = claim_folder(tmp_path)

    assert own == tmp_path / f"{MARK}-{owner_of(os.getpid())}"
    assert set(tmp_path.iterdir()) == {elsewhere, own}
    assert told == {"tempdir": str(own)}


def test_a_folder_whose_sockets_would_have_too_long_paths_is_not_made(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    assert claim_folder(deep) is None
    assert list(deep.iterdir()) == []


KILLED = """
import multiprocessing, os
from deployments.workers.cleanup import claim_folder
from deployments.tasks.bridges.hosted import get_temp_dir
claim_folder()
context = multiprocessing.get_context("forkserver")
worker = context.Process(target=print)
worker.start()
worker.join()
assert any("listener" in name for name in os.listdir(get_temp_dir()))
os.kill(os.getpid(), 9)
"""


def test_a_killed_replica_with_workers_leaves_a_folder_that_is_removed() -> None:
    with TemporaryDirectory(prefix="t") as folder:
        done = subprocess.run([sys.executable, "-c", KILLED], env={**os.environ, "TMPDIR": folder}, check=False)
        assert (done.returncode, [each.name.startswith(MARK) for each in Path(folder).iterdir()]) == (-9, [True])
        remove_left_over(Path(folder))
        assert list(Path(folder).iterdir()) == []


def test_an_id_that_is_used_again_is_another_process() -> None:
    namespace, pid, began = owner_of(os.getpid()).split("-")
    assert not has_died(f"{namespace}-{pid}-{began}")
    assert has_died(f"{namespace}-{pid}-{int(began) + 1}")
    assert not has_died(f"1-{pid}-{int(began) + 1}")


CLAIMS = """
import multiprocessing, os, sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from deployments.workers.cleanup import OWNER_VARIABLE, claim_shared_memory, name_by_owner, owner_of

def name_of_memory():
    memory = SharedMemory(create=True, size=8)
    memory.close()
    memory.unlink()
    return memory.name

os.environ.pop(OWNER_VARIABLE, None)  # of a test that has claimed the shared memory of its process
name_by_owner()
print(name_of_memory())
claim_shared_memory(Path(sys.argv[1]))
assert os.environ[OWNER_VARIABLE] == owner_of(os.getpid())
lock = multiprocessing.get_context("spawn").Lock()
print(name_of_memory(), lock._semlock.name, os.environ[OWNER_VARIABLE])
"""


def test_shared_memory_and_semaphores_have_the_replica_in_their_names(tmp_path: Path) -> None:
    of_no_replica = {name: value for name, value in os.environ.items() if name != OWNER_VARIABLE}
    command = [sys.executable, "-c", CLAIMS, str(tmp_path)]
    printed = subprocess.run(command, env=of_no_replica, check=True, capture_output=True, text=True)
    unclaimed, memory, semaphore, owner = printed.stdout.split()
    assert unclaimed.startswith("psm_"), "a process of no replica keeps its names"
    assert memory.rpartition("-")[0] == f"{MARK}-{owner}"
    assert semaphore.rpartition("-")[0] == f"/{MARK}-{owner}"
