"""Checks at the start which walls stand, by a program that tries to get over them (`programs/probe.py`)."""

import json
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from deployments.sandbox.interface import MIB, WALLS, Limits, Outcome, Program, SandboxLost, Wall, WallName, WallReport
from deployments.sandbox.launch import Interpreter, program_variables

_LIMITS = Limits(
    time_s=20.0,
    processor_time_s=3.0,
    memory_bytes=128 * MIB,
    processes=12,
    file_bytes=MIB // 4,
    disk_bytes=MIB,
    output_bytes=MIB // 16,
)
_LIMITS_BY_MANY = replace(_LIMITS, time_s=60.0, processor_time_s=30.0)
"""Memory is to end this program: its other limits are far from what a busy machine needs to fill that memory."""
_TRIES_BY_MANY = 3
_MEASURED_WITHIN_S = 10
"""Time in which a busy service notices that memory is full. It is waited for only where the wall does not stand."""
_OWN_VARIABLES = {*program_variables(Interpreter("", "", ("",)), ""), "LC_CTYPE", "PWD", "SHLVL", "_"}
"""Variables of the run, and those that Python, bubblewrap and shells set by themselves."""
_PROBE = (Path(__file__).parent / "programs" / "probe.py").read_text(encoding="utf-8")
Run = Callable[[Program, Limits], Outcome]


def check_walls(isolation: str, by: Mapping[WallName, str], run: Run) -> WallReport:
    """Runs the probe, alone and by many processes.

    Args:
        by: mechanism that should enforce each wall.

    Raises:
        SandboxLost: a program cannot be run at all.
    """
    stands = _probe_alone(run)
    stands["total_memory"], stands["ends_whole"], ending = _probe_many(run, "total_memory" in by)
    walls = []
    for name in WALLS:
        means = by.get(name)
        says = means or "nothing enforces it here"
        if means is None and stands[name]:
            says += ", although this one try was refused"
        elif means is not None and not stands[name]:
            says += f" did not hold it{ending if name == 'total_memory' else ''}"
        walls.append(Wall(name, stands[name] and means is not None, says))
    return WallReport(isolation, tuple(walls))


def _probe_alone(run: Run) -> dict[str, bool]:
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
            "variable": next((name for name in os.environ if name not in _OWN_VARIABLES), "none"),
            **asdict(_LIMITS),
        }
        outcome = run(Program(_PROBE, arguments=("alone", json.dumps(known))), _LIMITS)
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


def _probe_many(run: Run, enforced: bool) -> tuple[bool, bool, str]:
    """Whether many processes were ended for their memory, whether nothing was left of them, and how the try ended.

    A program that fails, or that a busy machine does not let come so far, says nothing about the wall: it is run again.

    Args:
        enforced: whether something should end the program. If not, it does not wait for that.
    """
    ended_whole = True
    for _ in range(_TRIES_BY_MANY):
        token = secrets.token_hex(8)
        wait_s = _MEASURED_WITHIN_S if enforced else 0
        arguments = ("many", json.dumps({"share": _LIMITS.memory_bytes // 4, "wait_s": wait_s}), token)
        outcome = run(Program(_PROBE, arguments=arguments), _LIMITS_BY_MANY)
        ended_whole = ended_whole and not is_running(token)
        if outcome.ended_by == "memory" or (outcome.ended_by == "exit" and outcome.exit_code == 0):
            break
    ending = f": the try ended by {outcome.ended_by} after {outcome.wall_s:.1f} s"
    if outcome.ended_by == "exit":
        ending += f" with exit code {outcome.exit_code} {outcome.stderr.strip()[-500:]}".rstrip()
    return outcome.ended_by == "memory", ended_whole, ending


def is_running(token: str) -> bool:
    """Whether a process of this machine has the token among its arguments."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if token.encode() in (folder / "cmdline").read_bytes():
                    return True
    return False
