"""Starts a program under resource limits and Landlock, as far as the kernel has it, and ends all that it leaves.

This process inherits all orphans of the program. `LimitJail` (`deployments/sandbox/limits.py`) writes the
specification; `ProcessTree` reads what is written to `status_fd`.

It is started for each run, so it imports little: json, pathlib and typing would double what its start costs.
"""

import ctypes
import os
import resource
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
SET_PARENT_DEATH_SIGNAL, SET_SECCOMP, SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVILEGES = 1, 22, 36, 38
SECCOMP_FILTER_MODE = 2
DEVICES = ("null", "zero", "full", "random", "urandom")
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
READ_ACCESS, DEVICE_ACCESS = 0b1101, 0b110


class _Stopped(Exception):
    """The service wants the run to end."""


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _prctl(option: int, value: int, pointer: object = 0) -> None:
    _checked(LIBC.prctl(option, value, pointer, 0, 0), f"prctl {option}")


def _report(spec: "dict[str, Any]", name: str, value: int) -> None:
    os.write(spec["status_fd"], f'{{"{name}": {value}}}\n'.encode())


def _main(spec: "dict[str, Any]") -> None:
    os.set_inheritable(spec["status_fd"], False)
    signal.signal(signal.SIGTERM, _stop)
    _prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    _prctl(SET_CHILD_SUBREAPER, 1)
    _report(spec, "child-pid", os.getpid())
    try:
        _run_program(spec)
    except _Stopped:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_descendants(spec["uid"])


def _stop(_number: int, _frame: "FrameType | None") -> None:
    raise _Stopped


def _run_program(spec: "dict[str, Any]") -> None:
    """Runs the program to its end, then ends what it left behind, then reports how it ended."""
    problem_read, problem_written = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _become_program(spec)
        except BaseException as error:
            os.write(problem_written, f"{type(error).__name__}: {error}".encode())
            os._exit(125)
    os.close(problem_written)
    problem = os.read(problem_read, 4096)
    if problem:
        os.write(2, problem)
        os.waitpid(child, 0)
        return
    ended, status, used = os.wait3(0)
    while ended != child:
        ended, status, used = os.wait3(0)
    _end_descendants(spec["uid"])
    _report(spec, "processor-ms", round(1000 * (used.ru_utime + used.ru_stime)))
    code = os.waitstatus_to_exitcode(status)
    _report(spec, "exit-code", code if code >= 0 else 128 - code)


def _become_program(spec: "dict[str, Any]") -> "NoReturn":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    os.chdir(spec["work"])
    for name, (soft, hard) in spec["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (soft, hard))
    _prctl(SET_NO_NEW_PRIVILEGES, 1)
    if spec["landlock"]:
        _restrict_by_landlock(spec)
    if spec["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[spec["uid"]] * 3)
        os.setresuid(*[spec["uid"]] * 3)
    if spec["filter"]:
        code = bytes.fromhex(spec["filter"])
        program = _FilterProgram(len(code) // 8, code)
        _prctl(SET_SECCOMP, SECCOMP_FILTER_MODE, ctypes.byref(program))
    os.execve(spec["command"][0], spec["command"], spec["environment"])


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def _restrict_by_landlock(spec: "dict[str, Any]") -> None:
    """Forbids all files but the named ones, TCP, and signals and abstract sockets of processes outside."""
    version = spec["landlock"]
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    fields = [everything, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0]
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = (ctypes.c_uint64 * 3)(*fields)
    rules = _checked(LIBC.syscall(CREATE_RULESET, ruleset, size, 0), "landlock_create_ruleset")
    files_only = 0b111 | (everything & 0b1100000000000000)
    allowed = {spec["work"]: everything, **dict.fromkeys(spec["folders"], READ_ACCESS)}
    allowed |= {f"/dev/{name}": DEVICE_ACCESS for name in DEVICES}
    for path, access in allowed.items():
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        permitted = access if os.path.isdir(path) else access & files_only
        rule = permitted.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)
        _checked(LIBC.syscall(ADD_RULE, rules, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(fd)
    _checked(LIBC.syscall(RESTRICT_SELF, rules, 0), "landlock_restrict_self")


def _end_descendants(uid: int | None) -> None:
    """Kills all processes of the run, also those that are started meanwhile. Orphans are children of this process."""
    while True:
        if uid is not None:
            _kill_all_of(uid)
        else:
            # Theirs become children of this process when they have ended.
            with open("/proc/thread-self/children") as file:
                for pid in file.read().split():
                    os.kill(int(pid), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def _kill_all_of(uid: int) -> None:
    """One call of the kernel, which no process can run away from."""
    child = os.fork()
    if child == 0:
        os.setresuid(uid, uid, uid)
        try:
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    # A Python literal that the service has written.
    _main(eval(sys.argv[1]))
