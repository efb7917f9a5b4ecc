"""Judges a sandbox as Harbor does: `tests/` is copied to `/tests`, `test.sh` runs, and its reward is read.

The verifier runs in the sandbox in which the agent has worked, as Harbor's does by default: an agent that replaces the
programs that the tests use can deceive them. It runs alone: all processes that came after `prepare` have ended, and its
folder is made anew, so that nobody else writes its reward or reads its variables.
"""

import asyncio
from collections.abc import Set
from typing import NamedTuple

from deployments.harbor.tasks import HarborTask, rewards_in
from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import KILLED, RunningSandbox, files_below
from deployments.sandbox.providers.leftover import end_others, processes_of

TESTS = "/tests"
OF_VERIFIER = "/logs/verifier"
LOGS = ("/logs/agent", OF_VERIFIER, "/logs/artifacts")
REWARD_FILES = (f"{OF_VERIFIER}/reward.json", f"{OF_VERIFIER}/reward.txt")
"""The first one that is there counts."""
OUTPUT = f"{OF_VERIFIER}/test-stdout.txt"
MOST_SHOWN = 1000
JUDGE = f"""({TESTS}/test.sh) > {OUTPUT} 2>&1
code=$?
[ -f {OUTPUT} ] && tail -c {4 * MOST_SHOWN} {OUTPUT} >&2
exit $code"""
"""Writes what the verifier printed last to stderr."""


class NotJudged(Exception):
    """The verifier gave no reward. The message is a sentence with what it wrote last."""


class _Verdict(NamedTuple):
    rewards: dict[str, float]
    """By name."""
    ended: int
    """Processes that the agent had left, and that were ended before the verifier ran."""


async def judge(sandbox: RunningSandbox, task: HarborTask, first: Set[str] = frozenset()) -> _Verdict:
    """Has the task's verifier judge what the agent has left.

    Args:
        first: the processes that go on beside it, as `prepare` returned them; by default the first one alone.

    Raises:
        NotJudged: it gave none, or not in its time.
        ProcessesLeft: what the agent has left cannot be ended, so the verifier did not run.
        SandboxLost: the sandbox is gone, or the verifier was killed from outside.
    """
    verifier = task.config.verifier
    ended = await end_others(sandbox, first)
    # What is there already is the agent's.
    await _checked(sandbox, ["rm", "-rf", "--", TESTS, OF_VERIFIER])
    await _checked(sandbox, ["mkdir", "-p", OF_VERIFIER])
    await sandbox.write_files(await asyncio.to_thread(files_below, task.tests, TESTS))
    await _checked(sandbox, ["chmod", "+x", f"{TESTS}/test.sh"])
    try:
        done = await sandbox.exec(["bash", "-c", JUDGE], environment=verifier.env, timeout_s=verifier.timeout_sec)
    except TimeoutError as error:
        raise NotJudged(f"The verifier was ended after {verifier.timeout_sec:g} s, its timeout_sec.") from error
    if done.exit_code == KILLED:
        raise SandboxLost("The verifier was killed, so what it has written counts for nothing.")
    for path in REWARD_FILES:
        try:
            if (content := await sandbox.read_file(path)) is not None:
                return _Verdict(rewards_in(content, path), ended)
        except ValueError as error:
            raise NotJudged(f"The verifier gave no reward: {str(error).removesuffix('.')}.") from error
    raise NotJudged(
        f"The verifier ended with exit code {done.exit_code} and wrote neither {' nor '.join(REWARD_FILES)}. "
        f"It printed last: {done.stderr.strip()[-MOST_SHOWN:] or 'nothing'}"
    )


async def prepare(sandbox: RunningSandbox) -> Set[str]:
    """Makes the folders that agent and verifier write to, and returns the processes that no agent has started.

    Raises what `judge` raises.
    """
    await _checked(sandbox, ["mkdir", "-p", *LOGS])
    return await processes_of(sandbox)


async def _checked(sandbox: RunningSandbox, argv: list[str]) -> None:
    """Runs a command of ours.

    Raises:
        NotJudged: it failed, as it does where an agent has removed the programs.
        SandboxLost: it was killed.
    """
    done = await sandbox.exec(argv)
    if done.exit_code == KILLED:
        raise SandboxLost(f"{argv[0]} was killed.")
    if done.exit_code != 0:
        raise NotJudged(f"The sandbox was not prepared: {argv[0]} ended with exit code {done.exit_code}: {done.stderr}")
