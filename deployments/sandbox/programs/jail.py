"""Starts a program behind walls that this process builds by itself, and ends all that it leaves.

With `namespaces` in its specification: under new namespaces, as bubblewrap does it. Without: under Landlock as far as
the kernel has it, and as the one that inherits all orphans of the program. `Jail` (`deployments/sandbox/isolation.py`)
writes the specification; `Supervisor` reads what is written to `status_fd`.

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
NEW_USER, NEW_REST = 0x10000000, 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
RELATIVE_ATIME_OF_STATVFS, RELATIVE_ATIME = 4096, 1 << 21
KEPT_FLAGS = NO_SUID | NO_DEVICES | NO_EXEC | 1024 | 2048
DETACH = 2
DEVICES = ("null", "zero", "full", "random", "urandom")
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
READ_ACCESS, DEVICE_ACCESS = 0b1101, 0b110


class Stopped(Exception):
    """The service wants the run to end."""


def checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int, pointer: object = 0) -> None:
    checked(LIBC.prctl(option, value, pointer, 0, 0), f"prctl {option}")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    result = LIBC.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    checked(result, f"mount {target}")


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def report(spec: "dict[str, Any]", name: str, value: int) -> None:
    os.write(spec["status_fd"], f'{{"{name}": {value}}}\n'.encode())


def main(spec: "dict[str, Any]") -> None:
    os.set_inheritable(spec["status_fd"], False)
    if spec["namespaces"]:
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        run_in_namespaces(spec)
        return
    signal.signal(signal.SIGTERM, stop)
    prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    prctl(SET_CHILD_SUBREAPER, 1)
    report(spec, "child-pid", os.getpid())
    write_files(spec, spec["work"])
    try:
        run_program(spec)
    except Stopped:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_descendants(spec["uid"])


def stop(_number: int, _frame: "FrameType | None") -> None:
    raise Stopped


def run_in_namespaces(spec: "dict[str, Any]") -> None:
    """The child is the first process of the new process namespace: all others end with it."""
    user, group = os.getuid(), os.getgid()
    checked(LIBC.unshare(NEW_REST | (NEW_USER if spec["uid"] is None else 0)), "unshare")
    if spec["uid"] is None:
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{user} {user} 1")
        write("/proc/self/gid_map", f"{group} {group} 1")
    is_known, make_known = os.pipe()
    first = os.fork()
    if first == 0:
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        os.close(make_known)
        if os.read(is_known, 1):
            build_root(spec)
            run_program(spec)
        os._exit(0)
    report(spec, "child-pid", first)
    os.write(make_known, b"1")
    os.waitpid(first, 0)


def build_root(spec: "dict[str, Any]") -> None:
    """Makes a file system that holds the system's folders to read, and private memory to write, and nothing else."""
    sources = {folder: os.open(folder, os.O_PATH | os.O_CLOEXEC) for folder in spec["folders"]}
    devices = {name: os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC) for name in DEVICES}
    mount(None, "/", None, RECURSIVE | PRIVATE)
    root = "/tmp"
    mount("tmpfs", root, "tmpfs", NO_SUID | NO_DEVICES, "mode=755,size=1m")
    os.mkdir(f"{root}/tmp")
    mount("tmpfs", f"{root}/tmp", "tmpfs", NO_SUID | NO_DEVICES, f"mode=1777,size={spec['disk_bytes']}")
    # Paths below /proc/self/fd reach what the new mount hides.
    for folder, fd in sources.items():
        bind(fd, f"{root}{folder}", os.path.isdir(f"/proc/self/fd/{fd}"))
    for link, target in spec["links"].items():
        os.symlink(target, f"{root}{link}")
    os.mkdir(f"{root}/proc")
    mount("proc", f"{root}/proc", "proc", NO_SUID | NO_DEVICES | NO_EXEC)
    os.mkdir(f"{root}/dev")
    mount("tmpfs", f"{root}/dev", "tmpfs", NO_SUID | NO_EXEC, "mode=755,size=64k")
    for name, fd in devices.items():
        write(f"{root}/dev/{name}", "")
        mount(f"/proc/self/fd/{fd}", f"{root}/dev/{name}", None, BIND)
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    os.mkdir(f"{root}/dev/shm")
    flags = NO_SUID | NO_DEVICES | NO_EXEC
    mount("tmpfs", f"{root}/dev/shm", "tmpfs", flags, f"mode=1777,size={spec['shared_memory_bytes']}")
    mount(None, f"{root}/dev", None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_EXEC)
    os.chdir(root)
    checked(LIBC.pivot_root(b".", b"."), "pivot_root")
    checked(LIBC.umount2(b".", DETACH), "umount2")
    os.chdir("/")
    os.mkdir(spec["work"])
    os.chmod(spec["work"], 0o777)
    write_files(spec, spec["work"])
    mount(None, "/", None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES)


def bind(fd: int, target: str, is_folder: bool) -> None:
    """Shows the opened file or folder at `target`, to read."""
    os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
    if not is_folder:
        write(target, "")
    mount(f"/proc/self/fd/{fd}", target, None, BIND | RECURSIVE)
    flags = os.statvfs(target).f_flag
    kept = flags & KEPT_FLAGS | (RELATIVE_ATIME if flags & RELATIVE_ATIME_OF_STATVFS else 0)
    mount(None, target, None, REMOUNT | BIND | READ_ONLY | NO_SUID | kept)


def write_files(spec: "dict[str, Any]", work: str) -> None:
    for name, fd in spec["files"].items():
        path = os.path.join(work, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(fd, "rb") as content, open(path, "wb") as file:
            file.write(content.read())
    for folder, _, names in os.walk(work):
        os.chmod(folder, 0o777)
        for name in names:
            os.chmod(os.path.join(folder, name), 0o666)


def run_program(spec: "dict[str, Any]") -> None:
    """Runs the program to its end, then ends what it left behind, then reports how it ended."""
    problem_read, problem_written = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            become_program(spec)
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
    if not spec["namespaces"]:
        end_descendants(spec["uid"])
    report(spec, "processor-ms", round(1000 * (used.ru_utime + used.ru_stime)))
    code = os.waitstatus_to_exitcode(status)
    report(spec, "exit-code", code if code >= 0 else 128 - code)


def become_program(spec: "dict[str, Any]") -> "NoReturn":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    os.chdir(spec["work"])
    for name, (soft, hard) in spec["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (soft, hard))
    prctl(SET_NO_NEW_PRIVILEGES, 1)
    if not spec["namespaces"] and spec["landlock"]:
        restrict_by_landlock(spec)
    if spec["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[spec["uid"]] * 3)
        os.setresuid(*[spec["uid"]] * 3)
    if spec["filter"]:
        code = bytes.fromhex(spec["filter"])
        program = FilterProgram(len(code) // 8, code)
        prctl(SET_SECCOMP, SECCOMP_FILTER_MODE, ctypes.byref(program))
    os.execve(spec["command"][0], spec["command"], spec["environment"])


class FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def restrict_by_landlock(spec: "dict[str, Any]") -> None:
    """Forbids all files but the named ones, TCP, and signals and abstract sockets of processes outside."""
    version = spec["landlock"]
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    fields = [everything, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0]
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = (ctypes.c_uint64 * 3)(*fields)
    rules = checked(LIBC.syscall(CREATE_RULESET, ruleset, size, 0), "landlock_create_ruleset")
    files_only = 0b111 | (everything & 0b1100000000000000)
    allowed = {spec["work"]: everything, **dict.fromkeys(spec["folders"], READ_ACCESS)}
    allowed |= {f"/dev/{name}": DEVICE_ACCESS for name in DEVICES}
    for path, access in allowed.items():
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        permitted = access if os.path.isdir(path) else access & files_only
        rule = permitted.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)
        checked(LIBC.syscall(ADD_RULE, rules, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(fd)
    checked(LIBC.syscall(RESTRICT_SELF, rules, 0), "landlock_restrict_self")


def end_descendants(uid: int | None) -> None:
    """Kills all processes of the run, also those that are started meanwhile. Orphans are children of this process."""
    while True:
        if uid is not None:
            kill_all_of(uid)
        else:
            for pid in descendants():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def kill_all_of(uid: int) -> None:
    """One call of the kernel, which no process can run away from."""
    child = os.fork()
    if child == 0:
        os.setresuid(uid, uid, uid)
        try:
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def descendants() -> set[int]:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


if __name__ == "__main__":
    # A Python literal that the service has written.
    main(eval(sys.argv[1]))
