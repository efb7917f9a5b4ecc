"""Checks at the start which walls stand, by a program that tries to get over them (`programs/probe.py`)."""

import json
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from deployments.sandbox.interface import MIB, WALLS, Limits, Outcome, Program, SandboxLost, WallName
from deployments.sandbox.launch import Interpreter

_LIMITS = Limits(
    time_s=60.0,
    processor_time_s=30.0,
    memory_bytes=128 * MIB,
    processes=12,
    file_bytes=MIB // 4,
    disk_bytes=MIB,
    output_bytes=MIB // 16,
)
"""Memory is to end the probe: its limits of time are far from what a busy machine needs to fill that memory."""
_TRIES = 3
_MEASURED_WITHIN_S = 10
"""Time in which a busy service notices that memory is full. It is waited for only where the wall does not stand."""
_OWN_VARIABLES = {*Interpreter("", "", ("",)).variables(""), "LC_CTYPE", "PWD", "SHLVL", "_"}
"""Variables of the run, and those that Python, bubblewrap and shells set by themselves."""
_PROBE = (Path(__file__).parent / "programs" / "probe.py").read_text(encoding="utf-8")


def missing_walls(without: Set[WallName], run: Callable[[Program, Limits], Outcome]) -> tuple[WallName, ...]:
    """Runs the probe; returns the walls that do not stand.

    A try that fails, or that does not use all memory on a busy machine, says nothing about that wall: it is repeated.

    Args:
        without: walls that nothing enforces, so that they do not stand even if the try to get over them fails.

    Raises:
        SandboxLost: a program cannot be run at all.
    """
    ended_whole = True
    for _ in range(_TRIES):
        token = secrets.token_hex(8)
        stands, outcome = _tried(run, token, 0 if "total_memory" in without else _MEASURED_WITHIN_S)
        ended_whole = ended_whole and not _is_running(token)
        if outcome.ended_by == "memory" or (outcome.ended_by == "exit" and outcome.exit_code == 0):
            break
    stands |= {"total_memory": outcome.ended_by == "memory", "ends_whole": ended_whole}
    return tuple(name for name in WALLS if name in without or not stands[name])


def _tried(run: Callable[[Program, Limits], Outcome], token: str, wait_s: float) -> tuple[dict[str, bool], Outcome]:
    """Whether each wall stands, but for those that the end of the run shows, and that end."""
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
            "wait_s": wait_s,
            **asdict(_LIMITS),
        }
        outcome = run(Program(_PROBE, arguments=(json.dumps(known), token)), _LIMITS)
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
    return found, outcome


def _is_running(token: str) -> bool:
    """Whether a process of this machine has the token among its arguments."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if token.encode() in (folder / "cmdline").read_bytes():
                    return True
    return False
