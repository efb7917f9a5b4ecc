"""Checks at the start which walls stand, by programs that try to get over them (`probe.py`, `probe_many.py`)."""

import json
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from deployments.sandbox.interface import MIB, WALLS, Limits, Outcome, Program, SandboxLost, Wall, WallName, WallReport
from deployments.sandbox.launch import Interpreter, environment

LIMITS = Limits(
    time_s=20.0,
    processor_time_s=3.0,
    memory_bytes=128 * MIB,
    processes=12,
    file_bytes=MIB // 4,
    disk_bytes=MIB,
    output_bytes=MIB // 16,
)
LIMITS_BY_MANY = replace(LIMITS, time_s=60.0, processor_time_s=30.0)
"""Memory is to end this program: its other limits are far from what a busy machine needs to fill that memory."""
TRIES_BY_MANY = 3
MEASURED_WITHIN_S = 10
"""In which a busy service notices that memory is full. It is waited for only where the wall does not stand."""
OWN_VARIABLES = {*environment(Interpreter("", "", ("",)), ""), "LC_CTYPE", "PWD", "SHLVL", "_"}
"""Which the program may have too: those of the run, and those that Python, bubblewrap and shells set by themselves."""
Run = Callable[[Program, Limits], Outcome]
FOLDER = Path(__file__).parent / "programs"


def check_walls(isolation: str, by: Mapping[WallName, str], run: Run) -> WallReport:
    """Runs the two probes.

    Args:
        by: what should enforce each wall.

    Raises:
        SandboxLost: a program cannot be run at all.
    """
    stands = probe_alone(run)
    by_many = probe_many(run, enforced="total_memory" in by)
    stands |= {"total_memory": by_many.memory_was_held, "ends_whole": by_many.ended_whole}
    endings: dict[WallName, str] = {"total_memory": f": {by_many.ending}"}
    return WallReport(isolation, tuple(wall(name, stands[name], by, endings.get(name, "")) for name in WALLS))


def wall(name: WallName, stands: bool, by: Mapping[WallName, str], ending: str) -> Wall:
    means = by.get(name)
    if stands and means is None:
        return Wall(name, False, "nothing enforces it here, although this one try was refused")
    if stands:
        return Wall(name, True, str(means))
    return Wall(name, False, "nothing enforces it here" if means is None else f"{means} did not hold it{ending}")


def probe_alone(run: Run) -> dict[str, bool]:
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
            **asdict(LIMITS),
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


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of the probe with many processes."""

    memory_was_held: bool
    """They were ended when they used too much memory together."""
    ended_whole: bool
    ending: str
    """How the last try ended, for people."""


def probe_many(run: Run, enforced: bool) -> ProbeResult:
    """Uses too much memory by many processes.

    A program that fails, or that a busy machine does not let come so far, says nothing about the wall: it is run again.

    Args:
        enforced: whether something should end the program. If not, it does not wait for that.
    """
    source = (FOLDER / "probe_many.py").read_text(encoding="utf-8")
    ended_whole = True
    for _ in range(TRIES_BY_MANY):
        token = secrets.token_hex(8)
        arguments = (str(LIMITS.memory_bytes // 4), token, str(MEASURED_WITHIN_S if enforced else 0))
        outcome = run(Program(source, arguments=arguments), LIMITS_BY_MANY)
        ended_whole = ended_whole and not is_running(token)
        if outcome.ended_by == "memory" or (outcome.ended_by == "exit" and outcome.exit_code == 0):
            break
    ending = f"the try ended by {outcome.ended_by} after {outcome.wall_s:.1f} s"
    if outcome.ended_by == "exit":
        ending += f" with exit code {outcome.exit_code} {outcome.stderr.strip()[-500:]}".rstrip()
    return ProbeResult(outcome.ended_by == "memory", ended_whole, ending)


def is_running(token: str) -> bool:
    """Whether a process of this machine has the token among its arguments."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if token.encode() in (folder / "cmdline").read_bytes():
                    return True
    return False
