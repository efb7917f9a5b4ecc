"""The filter of system calls, as a program for the kernel (seccomp, in the classic BPF that it takes).

A refused call fails with EPERM in the program and costs it nothing else. What is refused: interfaces to other
processes and to the kernel itself that ordinary Python programs do not need, and memory that no limit counts
(`memfd_create`, System V shared memory).
"""

import errno
import platform
import struct

LOAD_WORD, JUMP_EQUAL, JUMP_GREATER_OR_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL_PROCESS, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in the kernel's `struct seccomp_data`. The low half of the argument, on little-endian machines."""
X32_CALLS = 0x40000000
"""On x86-64, calls from this number on are those of another interface to the same kernel functions."""
NEW_NAMESPACE_FLAGS = 0x7E020000
"""All `CLONE_NEW*` flags of `clone`."""
UNIX, INET, INET6 = 1, 2, 10

REFUSED = {
    # name: (x86-64, arm64)
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
}
SIGNALS = {
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
KILL, CLONE, CLONE3, SOCKET = (62, 129), (56, 220), (435, 435), (41, 198)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column of the tables and the kernel's name of the architecture."""


def system_call_filter(*, sockets: bool = True, signals: bool = True, machine: str | None = None) -> bytes | None:
    """The filter as an array of the kernel's `struct sock_filter`; None for a machine that has no table here.

    Args:
        sockets: whether sockets of the families `UNIX`, `INET` and `INET6` may be made. Pairs of sockets always may.
        signals: whether signals may be sent to other process groups.
    """
    if (known := MACHINES.get(machine or platform.machine())) is None:
        return None
    column, architecture = known
    code = [
        _instruction(LOAD_WORD, ARCHITECTURE),
        *_jump_if(JUMP_EQUAL, architecture, [], [_instruction(RETURN, KILL_PROCESS)]),
        _instruction(LOAD_WORD, NUMBER),
    ]
    if column == 0:
        code += _jump_if(JUMP_GREATER_OR_EQUAL, X32_CALLS, [_refuse(errno.ENOSYS)])
    refused = [*REFUSED.values(), *([] if signals else SIGNALS.values())]
    for numbers in refused:
        code += _jump_if(JUMP_EQUAL, numbers[column], [_refuse(errno.EPERM)])
    # Its flags are behind a pointer, where a filter cannot look; the C library then uses `clone`.
    code += _jump_if(JUMP_EQUAL, CLONE3[column], [_refuse(errno.ENOSYS)])
    first = _instruction(LOAD_WORD, FIRST_ARGUMENT)
    allow = _instruction(RETURN, ALLOW)
    code += _jump_if(
        JUMP_EQUAL, CLONE[column], [first, *_jump_if(JUMP_ANY_BIT, NEW_NAMESPACE_FLAGS, [_refuse(errno.EPERM)]), allow]
    )
    families = (UNIX, INET, INET6) if sockets else ()
    known_families = [line for family in families for line in _jump_if(JUMP_EQUAL, family, [allow])]
    code += _jump_if(JUMP_EQUAL, SOCKET[column], [first, *known_families, _refuse(errno.EAFNOSUPPORT)])
    if not signals:
        # 0 is the program's own process group.
        code += _jump_if(JUMP_EQUAL, KILL[column], [first, *_jump_if(JUMP_EQUAL, 0, [allow]), _refuse(errno.EPERM)])
    return b"".join([*code, allow])


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _jump_if(jump: int, value: int, then: list[bytes], otherwise: list[bytes] | None = None) -> list[bytes]:
    """`then` if the loaded word compares to `value` as `jump` says, else `otherwise`; both go on behind it.

    A branch that does not return must be empty.
    """
    otherwise = otherwise or []
    return [_instruction(jump, value, 0 if then else len(otherwise), len(then)), *then, *otherwise]


def _refuse(number: int) -> bytes:
    return _instruction(RETURN, FAIL | number)
