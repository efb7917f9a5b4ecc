"""What a run gets, how it ends, and what is left of it: under the strongest isolation that this machine permits."""

import asyncio
import ctypes
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from deployments.sandbox import Limits, LocalSandbox, Outcome, Program, SandboxLost, SandboxTooWeak
from deployments.sandbox.local import DEFAULT_LIMITS
from deployments.sandbox.programs.jail import SET_CHILD_SUBREAPER
from tests.deployments.sandbox.running_processes import is_running
from tests.virtual_time import end_by_cancellation

pytestmark = [pytest.mark.slow, pytest.mark.true_clock]


def run(sandbox: LocalSandbox, source: str, limits: Limits = DEFAULT_LIMITS, **files: bytes) -> Outcome:
    return asyncio.run(sandbox.run(Program(source), files, limits))


def test_a_run_gets_its_input_and_gives_back_streams_and_exit_code(sandbox: LocalSandbox) -> None:
    files = {"helper.py": b"WORD = 'hello'", "data/numbers.bin": bytes(range(256)) * 300}
    source = """
import sys, helper
print(input(), sys.argv[1:], helper.WORD, len(open('data/numbers.bin', 'rb').read()))
print('err', file=sys.stderr)
sys.exit(3)
"""
    outcome = asyncio.run(sandbox.run(Program(source, stdin="grüße", arguments=("a", "b c")), files))
    assert (outcome.ended_by, outcome.exit_code) == ("exit", 3)
    assert (outcome.stdout, outcome.stderr) == ("grüße ['a', 'b c'] hello 76800\n", "err\n")


JUDGED_EQUAL = """\
from __future__ import annotations
import pickle
import sys

class Point:
    x: int = 1

print(__name__, sys.argv, pickle.loads(pickle.dumps(Point())).x, sorted(globals()))
print(exit, quit, license.__class__, copyright.__class__, credits.__class__, help)

def fail():
    raise ValueError("no")
"""


@pytest.fixture(params=["bubblewrap", "limits"])
def each_sandbox(request: pytest.FixtureRequest) -> Iterator[LocalSandbox]:
    """Under each isolation that this machine permits."""
    try:
        sandbox = LocalSandbox(max_concurrent_runs=1, isolation=request.param)
    except SandboxLost as error:
        pytest.skip(str(error))
    yield sandbox
    sandbox.close()


@pytest.mark.parametrize("end", ["exit", "quit()", "exit(3)", "sys.exit('bye')", "fail()", "def f(:", "1 / 0"])
def test_a_program_runs_as_with_the_python_people_have(each_sandbox: LocalSandbox, end: str, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(JUDGED_EQUAL + end)
    command = [str(Path(sys.executable).resolve()), "-I", "-B", "main.py"]
    plain = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, text=True)
    outcome = run(each_sandbox, JUDGED_EQUAL + end)
    folder = outcome.stderr.partition('  File "')[2].partition("/main.py")[0]
    assert (outcome.exit_code, outcome.stdout) == (plain.returncode, plain.stdout)
    assert outcome.stderr == plain.stderr.replace(str(tmp_path), folder)


def test_runs_share_no_files(sandbox: LocalSandbox) -> None:
    source = "import os\nprint(sorted(os.listdir('.')))\nopen('left', 'w').close()\nopen('/tmp/left', 'w').close()"
    assert [run(sandbox, source).stdout for _ in range(2)] == ["['main.py']\n"] * 2


def test_equal_programs_print_sets_in_the_same_order(sandbox: LocalSandbox) -> None:
    source = "print({str(number) for number in range(50)})"
    assert run(sandbox, source).stdout == run(sandbox, source).stdout


def test_ordinary_programs_may_use_threads_processes_and_locks(sandbox: LocalSandbox) -> None:
    source = """
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
import subprocess
with ThreadPoolExecutor(4) as threads: print(sum(threads.map(abs, range(10))))
if __name__ == "__main__":
    with get_context("fork").Pool(2) as pool: print(sum(pool.map(abs, range(10))))
    print(subprocess.run(["echo", "hello"], capture_output=True, text=True).stdout.strip())
"""
    outcome = run(sandbox, source)
    if sandbox.report.isolation == "limits":
        pytest.skip("Without namespaces there is no shared memory for the locks of multiprocessing.")
    assert (outcome.stdout, outcome.stderr) == ("45\n45\nhello\n", "")


def test_processor_time_of_all_processes_counts_together(sandbox: LocalSandbox) -> None:
    if "total_memory" in sandbox.report.missing:
        pytest.skip(f"Processes are not measured together under {sandbox.report.isolation}.")
    source = "import os\n[os.fork() for _ in range(2)]\nwhile True: pass"
    assert run(sandbox, source, Limits(processor_time_s=0.9, time_s=60)).ended_by == "processor_time"


def test_output_is_cut_at_its_limit_to_the_byte(sandbox: LocalSandbox) -> None:
    outcome = run(sandbox, "while True: print('x' * 999)", Limits(output_bytes=1500))
    assert (outcome.ended_by, outcome.stdout) == ("output", "x" * 999 + "\n" + "x" * 500)
    outcome = run(sandbox, "print('x' * 1499)", Limits(output_bytes=1500))
    assert (outcome.ended_by, len(outcome.stdout)) == ("exit", 1500), "exactly the limit is no excess"


async def test_a_run_that_nobody_waits_for_is_ended(sandbox: LocalSandbox) -> None:
    token = secrets.token_hex(8)
    task = asyncio.create_task(sandbox.run(Program("import time\ntime.sleep(99)", arguments=(token,)), {}, Limits()))
    while not is_running(token):
        await asyncio.sleep(0.01)
    await end_by_cancellation(task)
    while is_running(token):
        await asyncio.sleep(0.01)


async def test_further_runs_wait_and_all_are_answered(sandbox: LocalSandbox) -> None:
    outcomes = await asyncio.gather(*(sandbox.run(Program("print(1)")) for _ in range(6)))
    assert [outcome.stdout for outcome in outcomes] == ["1\n"] * 6


async def test_closing_ends_the_runs_and_they_fail_as_lost() -> None:
    sandbox = LocalSandbox(max_concurrent_runs=1)
    token = secrets.token_hex(8)
    task = asyncio.create_task(sandbox.run(Program("import time\ntime.sleep(99)", arguments=(token,))))
    while not is_running(token):
        await asyncio.sleep(0.01)
    await asyncio.to_thread(sandbox.close)
    with pytest.raises(SandboxLost, match=r"The sandbox was closed during the run\."):
        await task


@pytest.fixture
def orphans() -> Iterator[Callable[[], list[str]]]:
    """Names the processes that have ended and that only the first process of the machine could still wait for."""

    def ended() -> list[str]:
        children = [process for process in psutil.Process().children() if process.pid not in before]
        return [process.name() for process in children if process.status() == psutil.STATUS_ZOMBIE]

    libc = ctypes.CDLL(None)
    libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = {process.pid for process in psutil.Process().children()}
    yield ended
    libc.prctl(SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def test_the_limits_leave_no_process_that_has_ended(orphans: Callable[[], list[str]]) -> None:
    # Such a process counts against the limit of its user for as long as nobody waits for it.
    sandbox = LocalSandbox(max_concurrent_runs=1, isolation="limits")
    assert orphans() == []
    assert run(sandbox, "print(1)").ended_by == "exit"
    assert run(sandbox, "import os, time\nos.fork()\nos.fork()\ntime.sleep(60)", Limits(time_s=0.5)).ended_by == "time"
    assert run(sandbox, "while True: print('.' * 1000)", Limits(output_bytes=1000)).ended_by == "output"
    assert run(sandbox, "import os\nif os.fork() == 0: os.abort()").ended_by == "exit"
    sandbox.close()
    assert orphans() == []


def test_programs_import_from_the_packages_that_the_sandbox_is_given(tmp_path: Path) -> None:
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "given.py").write_text("WORD = 'given'")
    for path in (folder, *folder.parents):
        if path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(0o755)
    sandbox = LocalSandbox(max_concurrent_runs=1, packages=[str(folder)])
    assert run(sandbox, "import given\nprint(given.WORD)").stdout == "given\n"
    sandbox.close()


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "."])
def test_files_outside_of_the_directory_are_refused(sandbox: LocalSandbox, name: str) -> None:
    with pytest.raises(ValueError, match=r"files: .* must be a relative path without '\.\.'\."):
        asyncio.run(sandbox.run(Program(""), {name: b""}))


def test_a_file_in_place_of_the_program_is_refused(sandbox: LocalSandbox) -> None:
    with pytest.raises(ValueError, match=r"files: 'main\.py' is the program's own name, choose another one\."):
        asyncio.run(sandbox.run(Program(""), {"./main.py": b""}))


def test_a_required_wall_that_does_not_stand_keeps_it_from_starting() -> None:
    with pytest.raises(SandboxTooWeak) as refusal:
        LocalSandbox(max_concurrent_runs=1, isolation="limits", require=["network", "total_memory"])
    assert str(refusal.value) == (
        "The sandbox is not started: required walls do not stand on this machine: total_memory. Its isolation is "
        "limits. Install bubblewrap and permit namespaces to the service, or do not require these walls."
    )
