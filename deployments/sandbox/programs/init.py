"""First process of a sandbox that lives on: runs the commands that its owner sends, and hands it connections.

    init.py CONTROL_FD PORT OWNER WORKDIR

The owner (`deployments/sandbox/providers/local_sandbox.py`), whose label is OWNER, holds the other end of CONTROL_FD, a
socket of packets with descriptors:

    from the owner   `exec`   a command as JSON; its stdin, stdout and stderr; a stream, which gets its exit code
    to the owner     `ready`  its `/proc`
                     `conn`   a connection that came to PORT of the sandbox's own loopback

A command ends when the owner closes its stream. No path leads to the control socket, so that no other program of the
sandbox can take its place. When the owner is gone, this process ends, and with it, as the first one of its namespace,
all others.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading

LOCK = threading.RLock()
STARTED: "set[int]" = set()
"""The processes that threads of this one wait for."""


def _reap_orphans(*_: object) -> None:
    """Waits for the processes that have ended and that nobody else waits for: what commands have left."""
    with LOCK, contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in STARTED:
            os.waitpid(ended.si_pid, 0)


def _main(control_fd: int, port: int, workdir: str) -> None:
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    # A program of the sandbox with the same user may not write to the memory of this one.
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    # The kernel keeps signals without a handler from the first process of a namespace. Commands inherit ignored ones.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, _reap_orphans)
    os.makedirs(workdir, exist_ok=True)
    listening = socket.create_server(("127.0.0.1", port), backlog=128)
    threading.Thread(target=_hand_over, args=(control, listening), daemon=True).start()
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    socket.send_fds(control, [b"ready"], [proc])
    os.close(proc)
    while True:
        kind, fds, _, _ = socket.recv_fds(control, 64, 5)
        if not kind:
            os._exit(0)
        threading.Thread(target=_exec, args=(fds, workdir), daemon=True).start()


def _hand_over(control: socket.socket, listening: socket.socket) -> None:
    while True:
        connection, _ = listening.accept()
        with connection:
            socket.send_fds(control, [b"conn"], [connection.fileno()])


def _exec(fds: "list[int]", workdir: str) -> None:
    """Runs a command to its end. All that it inherits is what the owner has sent."""
    asked_fd, stdin, stdout, stderr, stream_fd = fds
    with socket.socket(fileno=stream_fd) as stream:
        try:
            with open(asked_fd, "rb") as file:
                asked = json.load(file)
            code = _exit_code(asked, workdir, stream, stdin, stdout, stderr)
        # An argument that no process can have, such as one with a null byte, is a `ValueError`.
        except (OSError, ValueError) as error:
            os.write(stderr, f"{error}\n".encode(errors="replace"))
            code = 126 if isinstance(error, PermissionError) else 127
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        with contextlib.suppress(OSError):
            stream.sendall(b"%d" % code)


def _exit_code(asked: "dict[str, Any]", workdir: str, stream: socket.socket, *streams: int) -> int:
    stdin, stdout, stderr = streams
    with LOCK:
        process = subprocess.Popen(
            asked["argv"],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=asked["cwd"] or workdir,
            env=asked["environment"],
            start_new_session=True,
        )
        STARTED.add(process.pid)
    ended = threading.Event()
    threading.Thread(target=_end_with, args=(stream, process, ended), daemon=True).start()
    code = process.wait()
    ended.set()
    with LOCK:
        STARTED.discard(process.pid)
    # It may have stood before orphans.
    _reap_orphans()
    return code if code >= 0 else 128 - code


def _end_with(stream: socket.socket, process: "subprocess.Popen[bytes]", ended: threading.Event) -> None:
    """Ends the command when the owner closes its end: nobody waits for it any longer."""
    with contextlib.suppress(OSError):
        stream.recv(1)
    if not ended.is_set():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4])
