"""Child watcher beside uvloop, so that Python's own event loop can start processes in a thread of its own.

uvloop's policy, that of a replica, has no child watcher: Python's own loop then starts no process. Needed with uvloop
0.23 and Python up to 3.13; Python 3.14 has no watchers, and needs none.
"""

import asyncio
import sys


class PolicyWithChildWatcher(asyncio.AbstractEventLoopPolicy):
    """Another policy, and a watcher by which Python's own event loop notices the end of a process that it started."""

    def __init__(self, policy: asyncio.AbstractEventLoopPolicy) -> None:
        self._policy = policy
        self._watcher = asyncio.ThreadedChildWatcher()

    def get_event_loop(self) -> asyncio.AbstractEventLoop:
        return self._policy.get_event_loop()

    def set_event_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._policy.set_event_loop(loop)

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return self._policy.new_event_loop()

    def get_child_watcher(self) -> asyncio.AbstractChildWatcher:
        return self._watcher

    def set_child_watcher(self, watcher: asyncio.AbstractChildWatcher) -> None:
        self._policy.set_child_watcher(watcher)


def let_loops_start_processes() -> None:
    """Gives this process a child watcher, which uvloop's policy (that of a replica) does not have."""
    if sys.version_info >= (3, 14):
        return
    policy = asyncio.get_event_loop_policy()
    try:
        policy.get_child_watcher()
    except NotImplementedError:
        asyncio.set_event_loop_policy(PolicyWithChildWatcher(policy))
