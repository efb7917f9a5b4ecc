"""What the filter of system calls decides, by an interpreter of the few operations that it is made of."""

import errno
import struct

import pytest

from deployments.sandbox.system_calls import CLONE, CLONE3, KILL, MACHINES, REFUSED, SIGNALS, SOCKET, system_call_filter

ALLOWED, KILLED = "allowed", "killed"
HARMLESS = {"x86_64": (0, 1, 9, 59, 231), "aarch64": (63, 64, 222, 221, 94)}
"""Reading, writing, mapping, executing, ending."""


def decision(code: bytes, machine: str, number: int, argument: int = 0, architecture: int | None = None) -> str | int:
    """ALLOWED, KILLED, or the number of the error."""
    words = {0: number, 4: MACHINES[machine][1] if architecture is None else architecture, 16: argument}
    lines = list(struct.iter_unpack("=HBBI", code))
    loaded = place = 0
    while True:
        operation, if_true, if_false, value = lines[place]
        place += 1
        match operation:
            case 0x20:
                loaded = words[value]
            case 0x15:
                place += if_true if loaded == value else if_false
            case 0x35:
                place += if_true if loaded >= value else if_false
            case 0x45:
                place += if_true if loaded & value else if_false
            case 0x06:
                return ALLOWED if value == 0x7FFF0000 else KILLED if value == 0x80000000 else int(value) & 0xFFFF


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def filter_of(machine: str, **options: bool) -> bytes:
    code = system_call_filter(machine=machine, **options)
    assert code is not None
    return code


def column(machine: str) -> int:
    return MACHINES[machine][0]


def test_ordinary_calls_are_allowed(machine: str) -> None:
    code = filter_of(machine)
    assert [decision(code, machine, number) for number in HARMLESS[machine]] == [ALLOWED] * 5


def test_each_call_of_the_table_is_refused(machine: str) -> None:
    code = filter_of(machine)
    decisions = {name: decision(code, machine, numbers[column(machine)]) for name, numbers in REFUSED.items()}
    assert decisions == dict.fromkeys(REFUSED, errno.EPERM)


def test_processes_and_threads_may_be_made_but_no_namespaces(machine: str) -> None:
    code, clone = filter_of(machine), CLONE[column(machine)]
    assert decision(code, machine, clone, 0x01200011) == ALLOWED
    assert decision(code, machine, clone, 0x003D0F00) == ALLOWED
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decision(code, machine, clone, flag | 0x11) == errno.EPERM
    assert decision(code, machine, CLONE3[column(machine)]) == errno.ENOSYS


def test_sockets_of_three_families_may_be_made(machine: str) -> None:
    code, socket = filter_of(machine), SOCKET[column(machine)]
    assert [family for family in range(64) if decision(code, machine, socket, family) == ALLOWED] == [1, 2, 10]
    assert decision(code, machine, socket, 40) == errno.EAFNOSUPPORT


def test_without_a_network_namespace_no_socket_may_be_made(machine: str) -> None:
    code = filter_of(machine, sockets=False)
    assert {decision(code, machine, SOCKET[column(machine)], family) for family in range(64)} == {errno.EAFNOSUPPORT}


def test_signals_may_be_sent_unless_they_would_reach_the_service(machine: str) -> None:
    kill = KILL[column(machine)]
    code, strict = filter_of(machine), filter_of(machine, signals=False)
    assert decision(code, machine, kill, 1234) == ALLOWED
    assert decision(strict, machine, kill, 1234) == errno.EPERM
    assert decision(strict, machine, kill, 0) == ALLOWED
    for numbers in SIGNALS.values():
        assert decision(code, machine, numbers[column(machine)]) == ALLOWED
        assert decision(strict, machine, numbers[column(machine)]) == errno.EPERM


def test_a_program_for_another_architecture_is_killed(machine: str) -> None:
    assert decision(filter_of(machine), machine, 1, architecture=0x40000003) == KILLED


def test_the_second_interface_of_x86_64_is_refused() -> None:
    assert decision(filter_of("x86_64"), "x86_64", 0x40000000 + 1) == errno.ENOSYS


def test_a_machine_without_a_table_has_no_filter() -> None:
    assert system_call_filter(machine="riscv64") is None
