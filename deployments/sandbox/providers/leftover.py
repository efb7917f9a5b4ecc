"""Ends what a command has left in a sandbox: every process but those that were there before it.

One line of shell does it for all providers, through `exec`. It uses what the shell has built in and `/proc` alone. A
single call stops all processes of the sandbox but its first one, so that none of them forks, or gets away, while they
are killed one after another; those that are kept go on then. Who is not root of the sandbox ends only its own.

What is kept: the first process, what it has forked without a program of its own, those that `processes_of` has listed,
and those that run the line.
"""

import asyncio
from collections.abc import Set

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import KILLED, RunningSandbox

SHELL = r"""
stat_of() {
  text=
  while IFS= read -r line || [ -n "$line" ]; do text="$text$line "; done 2>&- < "/proc/$1/stat" || return 1
  [ -n "$text" ] || return 1
  # The name of a process may hold anything, and ends with the last bracket.
  named=${text%)*}
  set -- ${text##*)}
  state=$1 parent=$2 session=$4 is_of_kernel=$(($7 / 2097152 % 2)) started=${20}
}
kept=" $* "
stat_of $$ || exit 3
own=" $$ " own_session=$session
while [ "$parent" -gt 1 ] && stat_of "$parent"; do own="$own${named%% *} "; done
stat_of 1 || exit 3
first_session=$session
"""
"""`stat_of` reads the state of a process. `own` are the ones that run this: their parents, up to the first one."""
LIST = f"""{SHELL}
for folder in /proc/[0-9]*; do
  pid=${{folder#/proc/}}
  stat_of "$pid" || continue
  case "$own" in *" $pid "*) continue;; esac
  echo "$pid:$started"
done
"""
END = f"""{SHELL}
kill -STOP -1 2>&-
for folder in /proc/[0-9]*; do
  pid=${{folder#/proc/}} is_kept=
  stat_of "$pid" && [ "$is_of_kernel" = 0 ] && [ "$pid" != 1 ] || continue
  case "$own" in *" $pid "*) is_kept=1;; esac
  case "$kept" in *" $pid:$started "*) is_kept=1;; esac
  # Commands have a session of their own, and do not come into that of the first process.
  [ "$parent" = 1 ] && [ "$session" = "$first_session" ] && [ "$own_session" != "$first_session" ] && is_kept=1
  if [ -n "$is_kept" ]; then kill -CONT "$pid" 2>&-; continue; fi
  # Where the first thread has ended and others go on, the process looks as if it had ended.
  set -- /proc/$pid/task/*
  kill -KILL "$pid" 2>&-
  case "$state" in Z|X) [ $# -gt 1 ] || continue;; esac
  echo "$named)"
done
"""
"""Writes the processes that have not ended yet."""
FIRST = """trap 'exit 0' TERM
while :; do (read -r pid _ < /proc/self/stat; kill -STOP "$pid") & wait $!; done"""
"""The program of a container's first process: it reaps the others, and starts no program, which might be replaced."""
TRIES, TRY_EVERY_S = 50, 0.1
ANSWERS_WITHIN_S = 60.0
MOST_SHOWN = 200


class ProcessesLeft(Exception):
    """It cannot be said that nothing is left in the sandbox. The message is a sentence."""


async def processes_of(sandbox: RunningSandbox) -> Set[str]:
    """The processes that are there. Raises what `end_others` raises."""
    return frozenset((await _run_line(sandbox, LIST)).split())


async def end_others(sandbox: RunningSandbox, kept: Set[str]) -> int:
    """Returns when all processes of the sandbox have ended but those that are kept: how many there were of the others.

    Args:
        kept: what `processes_of` has listed before.

    Raises:
        ProcessesLeft: some go on, or it is not known.
        SandboxLost: the sandbox is gone.
        OutOfMemory: as `RunningSandbox.exec`.
    """
    ended = 0
    for _ in range(TRIES):
        left = (await _run_line(sandbox, END, *kept)).splitlines()
        if not left:
            return ended
        ended = ended or len(left)
        await asyncio.sleep(TRY_EVERY_S)
    raise ProcessesLeft(f"Processes of the sandbox cannot be ended: {', '.join(left)[:MOST_SHOWN]}.")


async def _run_line(sandbox: RunningSandbox, line: str, *arguments: str) -> str:
    """Runs a line of shell with the arguments and returns its stdout. Raises `ProcessesLeft`."""
    try:
        argv = ["/bin/sh", "-c", line, "sh", *arguments]
        done = await sandbox.exec(argv, environment={"LC_ALL": "C"}, cwd="/", timeout_s=ANSWERS_WITHIN_S)
    except TimeoutError as error:
        raise ProcessesLeft(f"The processes of the sandbox were not listed within {ANSWERS_WITHIN_S:g} s.") from error
    if done.exit_code == KILLED:
        raise SandboxLost("The command that lists the processes of the sandbox was killed.")
    if done.exit_code != 0:
        said = done.stderr.strip()[:MOST_SHOWN]
        raise ProcessesLeft(f"The processes of the sandbox are not known: exit code {done.exit_code}: {said}")
    return done.stdout
