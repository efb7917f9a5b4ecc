"""First process of a sandbox that lives on: runs the commands that its owner sends, and hands it connections.

    init.py CONTROL_FD PORT OWNER WORKDIR

The owner (`deployments/sandbox/providers/local_sandbox.py`), whose label is OWNER, holds the other end of CONTROL_FD, a
socket of packets. Each packet carries one descriptor:

    from the owner   `exec`   a stream: the request as a line of JSON, stdin; back come stdout, stderr, the end
                     `write`  a stream: a tar archive, which is unpacked below `/`; back comes the end
                     `read`   a stream: a path as a line of JSON; back come frames, then the end
                     `pack`   a stream: folders to leave out as a line of JSON; back comes a tar archive
    to the owner     `ready`  its `/proc`
                     `conn`   a connection that came to PORT of the sandbox's own loopback

No path leads to the control socket, so that no other program of the sandbox can take its place. When the owner is gone,
this process ends, and with it, as the first one of its namespace, all others.
"""

import contextlib
import ctypes
import io
import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import tarfile
import threading

CHUNK_BYTES = 65536
READ_AFTER_END_S = 0.2
"""How long output is read after the end of a command: a process that it left may hold it open."""
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TRUSTED: "Any" = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
"""An archive comes from the owner, or from a sandbox like this one, and is unpacked with no more rights."""


LOCK = threading.RLock()
STARTED: "set[int]" = set()
"""The processes that threads of this one wait for."""


def reap_orphans(*_: object) -> None:
    """Waits for the processes that have ended and that nobody else waits for: what commands have left."""
    with LOCK, contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in STARTED:
            os.waitpid(ended.si_pid, 0)


class Frames:
    """The answers on one stream: a kind, a length, bytes."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, kind: bytes, content: bytes) -> None:
        with self._lock:
            self._stream.sendall(kind + struct.pack("<I", len(content)) + content)

    def end(self, **fields: "Any") -> None:
        self.send(b"x", json.dumps(fields).encode())


def main(control_fd: int, port: int, workdir: str) -> None:
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    # A program of the sandbox with the same user may not write to the memory of this one.
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    # The kernel keeps signals without a handler from the first process of a namespace. Commands inherit ignored ones.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, reap_orphans)
    os.makedirs(workdir, exist_ok=True)
    listening = socket.create_server(("127.0.0.1", port), backlog=128)
    threading.Thread(target=_hand_over, args=(control, listening), daemon=True).start()
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    socket.send_fds(control, [b"ready"], [proc])
    os.close(proc)
    work = {"exec": run, "write": write, "read": read, "pack": pack}
    while True:
        kind, fds, _, _ = socket.recv_fds(control, 64, 1)
        if not kind:
            os._exit(0)
        stream = socket.socket(fileno=fds[0])
        threading.Thread(target=serve, args=(work[kind.decode()], stream, workdir), daemon=True).start()


def _hand_over(control: socket.socket, listening: socket.socket) -> None:
    while True:
        connection, _ = listening.accept()
        with connection:
            socket.send_fds(control, [b"conn"], [connection.fileno()])


def serve(work: "Any", stream: socket.socket, workdir: str) -> None:
    with stream, stream.makefile("rb") as received:
        frames = Frames(stream)
        try:
            work(received, frames, workdir)
        except (BrokenPipeError, ConnectionResetError):
            return
        except (OSError, tarfile.TarError) as error:
            frames.end(error=f"{type(error).__name__}: {error}")


def run(received: io.BufferedReader, frames: Frames, workdir: str) -> None:
    asked = json.loads(received.readline())
    stdin = received.read(asked["stdin_bytes"])
    try:
        with LOCK:
            process = subprocess.Popen(
                asked["argv"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=asked["cwd"] or workdir,
                env=asked["environment"],
                start_new_session=True,
            )
            STARTED.add(process.pid)
    # An argument that no process can have, such as one with a null byte, is a `ValueError`.
    except (OSError, ValueError) as error:
        frames.send(b"e", f"{error}\n".encode())
        frames.end(exit_code=126 if isinstance(error, PermissionError) else 127)
        return
    ended = threading.Event()
    # The owner closes its end when nobody waits for the command any longer.
    threading.Thread(target=_end_with, args=(received, process, ended), daemon=True).start()
    pipes = [(b"o", process.stdout), (b"e", process.stderr)]
    reading = [threading.Thread(target=_forward, args=(pipe, kind, frames), daemon=True) for kind, pipe in pipes]
    for thread in reading:
        thread.start()
    threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True).start()
    code = process.wait()
    ended.set()
    with LOCK:
        STARTED.discard(process.pid)
    # It may have stood before orphans.
    reap_orphans()
    for thread in reading:
        thread.join(READ_AFTER_END_S)
    frames.end(exit_code=code if code >= 0 else 128 - code)


def _end_with(received: io.BufferedReader, process: "subprocess.Popen[bytes]", ended: threading.Event) -> None:
    with contextlib.suppress(OSError):
        received.read(1)
    if not ended.is_set():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _forward(pipe: "Any", kind: bytes, frames: Frames) -> None:
    try:
        while part := os.read(pipe.fileno(), CHUNK_BYTES):
            frames.send(kind, part)
    except OSError:
        pass


def _feed(pipe: "Any", content: bytes) -> None:
    try:
        pipe.write(content)
        pipe.close()
    except OSError:
        pass


def write(received: io.BufferedReader, frames: Frames, _workdir: str) -> None:
    try:
        with tarfile.open(fileobj=received, mode="r|") as archive:
            archive.extractall("/", **TRUSTED)
    finally:
        # The owner reads the answer when all is sent.
        while received.read(CHUNK_BYTES):
            pass
    frames.end()


def read(received: io.BufferedReader, frames: Frames, _workdir: str) -> None:
    asked = json.loads(received.readline())
    try:
        opened = os.open(asked["path"], os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        frames.end(missing=True)
        return
    found = os.fstat(opened)
    if not stat.S_ISREG(found.st_mode) or found.st_size > asked["most_bytes"]:
        os.close(opened)
        frames.end(error=f"it is not a file of at most {asked['most_bytes']} bytes")
        return
    # It may grow, and files of `/proc` have no size.
    left = asked["most_bytes"]
    with os.fdopen(opened, "rb") as file:
        while part := file.read(CHUNK_BYTES):
            left -= len(part)
            if left < 0:
                frames.end(error=f"it is not a file of at most {asked['most_bytes']} bytes")
                return
            frames.send(b"o", part)
    frames.end()


def pack(received: io.BufferedReader, frames: Frames, _workdir: str) -> None:
    left_out = set(json.loads(received.readline()))

    def kept(member: tarfile.TarInfo) -> "tarfile.TarInfo | None":
        is_kept = member.isreg() or member.isdir() or member.issym() or member.islnk()
        return member if is_kept and f"/{member.name}" not in left_out else None

    class Sending(io.RawIOBase):
        def write(self, part: "Any") -> int:
            frames.send(b"o", bytes(part))
            return len(part)

    with tarfile.open(fileobj=Sending(), mode="w|") as archive:
        for name in sorted(os.listdir("/")):
            archive.add(f"/{name}", arcname=name, filter=kept)
    frames.end()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4])
