"""Tries out at the start which walls stand, by programs that try to get over them (`probe.py`, `probe_many.py`)."""

import json
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from deployments.sandbox.interface import MIB, Limits, Outcome, Program, SandboxLost
from deployments.sandbox.launch import Interpreter, environment
from deployments.sandbox.walls import WALLS, Wall, WallName, WallReport

LIMITS = Limits(
    time_s=20.0,
    processor_time_s=3.0,
    memory_bytes=128 * MIB,
    processes=12,
    file_bytes=MIB // 4,
    disk_bytes=MIB,
    output_bytes=MIB // 16,
)
OWN_VARIABLES = {*environment(Interpreter("", "", ("",)), ""), "LC_CTYPE", "PWD", "SHLVL", "_"}
"""Which the program may have too: those of the run, and those that Python, bubblewrap and shells set by themselves."""
Run = Callable[[Program, Limits], Outcome]
FOLDER = Path(__file__).parent / "programs"


def tried_out(isolation: str, by: Mapping[WallName, str], run: Run) -> WallReport:
    """Runs the two probes.

    Args:
        by: what should enforce each wall.

    Raises:
        SandboxLost: a program cannot be run at all.
    """
    stands: dict[str, bool] = {**tried_by_one(run), **tried_by_many(run)}
    return WallReport(isolation, tuple(wall(name, stands[name], by) for name in WALLS))


def wall(name: WallName, stands: bool, by: Mapping[WallName, str]) -> Wall:
    means = by.get(name)
    if stands and means is None:
        return Wall(name, False, "nothing enforces it here, although this one try was refused")
    if stands:
        return Wall(name, True, str(means))
    return Wall(name, False, "nothing enforces it here" if means is None else f"{means} did not hold it")


def tried_by_one(run: Run) -> dict[str, bool]:
    token = secrets.token_hex(8)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        tempfile.NamedTemporaryFile(prefix=f"rollout-sandbox-{token}") as file,
    ):
        abstract.bind(f"\0rollout-sandbox-{token}")
        abstract.listen()
        Path(file.name).chmod(0o644)
        known = {
            "service": [os.getpid(), Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]],
            "port": server.getsockname()[1],
            "abstract_socket": f"rollout-sandbox-{token}",
            "file": file.name,
            "variable": next((name for name in os.environ if name not in OWN_VARIABLES), "none"),
            "processor_time_s": LIMITS.processor_time_s,
            "memory_bytes": LIMITS.memory_bytes,
            "processes": LIMITS.processes,
            "file_bytes": LIMITS.file_bytes,
            "disk_bytes": LIMITS.disk_bytes,
        }
        source = (FOLDER / "probe.py").read_text(encoding="utf-8")
        outcome = run(Program(source, arguments=(json.dumps(known),)), LIMITS)
    try:
        found: dict[str, bool] = json.loads(outcome.stdout)
    except json.JSONDecodeError as error:
        raise SandboxLost(
            f"The sandbox cannot run a program: it ended by {outcome.ended_by} with exit code {outcome.exit_code} and "
            f"wrote {outcome.stderr.strip()[-500:]!r}."
        ) from error
    if (written := Path(f"{file.name}.written")).exists():
        written.unlink()
        found["files"] = False
    return found


def tried_by_many(run: Run) -> dict[str, bool]:
    token = secrets.token_hex(8)
    source = (FOLDER / "probe_many.py").read_text(encoding="utf-8")
    outcome = run(Program(source, arguments=(str(LIMITS.memory_bytes // 4), token)), LIMITS)
    return {"total_memory": outcome.ended_by == "memory", "ends_whole": not is_running(token)}


def is_running(token: str) -> bool:
    """Whether a process of this machine has the token among its arguments."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if token.encode() in (folder / "cmdline").read_bytes():
                    return True
    return False
