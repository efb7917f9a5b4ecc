"""Each attack is contained: its run is answered, the service is healthy, and a run beside it is unaffected.

`ATTACKED_ISOLATIONS="bubblewrap limits"` also runs them under the weaker kinds of isolation. Where a wall does not
stand on this machine, the attacks on it are skipped, with the sandbox's own report as the reason.
"""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from deployments.sandbox import Limits, LocalSandbox, Outcome, Program, SandboxLost
from tests.deployments.sandbox.attacks.attack import Attack
from tests.deployments.sandbox.attacks.on_processes import ON_PROCESSES
from tests.deployments.sandbox.attacks.on_the_service import ON_THE_SERVICE
from tests.deployments.sandbox.running_processes import is_running

pytestmark = pytest.mark.slow

ATTACKS = [*ON_PROCESSES, *ON_THE_SERVICE]
ISOLATIONS = os.environ.get("ATTACKED_ISOLATIONS", "auto").split()
SECRET = "ROLLOUT_ATTACKED_SECRET"
CLOSED_WITHIN_S = 60.0


@pytest.fixture(scope="module", params=ISOLATIONS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[LocalSandbox]:
    os.environ[SECRET] = SECRET
    try:
        sandbox = LocalSandbox(max_concurrent_runs=2, isolation=request.param)
    except SandboxLost as error:
        pytest.skip(str(error))
    yield sandbox
    sandbox.close()
    del os.environ[SECRET]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """What an attack tries to reach, as its program is told; the file is the last."""
    folder = tmp_path_factory.mktemp("service")
    file = folder / "secret.txt"
    file.write_text("secret")
    name = f"rollout-attacked-{secrets.token_hex(4)}"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
    ):
        abstract.bind(f"\0{name}")
        abstract.listen()
        path = str(folder / "socket")
        named.bind(path)
        named.listen()
        yield str(os.getpid()), str(server.getsockname()[1]), name, path, str(file)


async def attacked(sandbox: LocalSandbox, program: Program, limits: Limits) -> tuple[Outcome, Outcome, Outcome]:
    """Outcomes of the attack, of a program beside it, and of one after it."""
    honest = Program("print(sum(range(10 ** 6)))")
    attack, beside = await asyncio.gather(sandbox.run(program, {}, limits), sandbox.run(honest))
    return attack, beside, await sandbox.run(honest)


def open_files() -> dict[str, str]:
    """What this process has open, by descriptor."""
    found = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found[descriptor.name] = str(descriptor.readlink())
    return found


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_is_contained(sandbox: LocalSandbox, target: tuple[str, ...], attack: Attack) -> None:
    if attack.wall in sandbox.report.missing:
        pytest.skip(f"The wall {attack.wall} does not stand under {sandbox.report.isolation}.")
    token = secrets.token_hex(8)
    open_before = len(open_files())
    program = Program(attack.program, arguments=(token, *target))
    outcome, beside, after = asyncio.run(attacked(sandbox, program, attack.limits))
    assert outcome.ended_by in attack.ended_by, outcome
    assert "BREACH" not in outcome.stdout, outcome
    if attack.stdout is not None:
        assert outcome.stdout == attack.stdout, outcome
    if attack.exit_code is not None:
        assert outcome.exit_code == attack.exit_code, outcome
    assert len(outcome.stdout.encode()) <= 3 * attack.limits.output_bytes
    for honest in (beside, after):
        assert (honest.ended_by, honest.exit_code, honest.stdout) == ("exit", 0, "499999500000\n"), honest
    assert not is_running(token)
    deadline = time.monotonic() + CLOSED_WITHIN_S
    while len(open_files()) > open_before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(open_files()) <= open_before, open_files()
    file = Path(target[-1])
    assert file.read_text() == "secret"
    assert sorted(path.name for path in file.parent.iterdir()) == ["secret.txt", "socket"]
