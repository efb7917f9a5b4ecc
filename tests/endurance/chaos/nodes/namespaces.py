"""Network namespaces of this machine on one bridge: each is a node with an address of its own. Needs root and `ip`."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from service.startup.processes import wait_for_ends

BRIDGE = "chaos0"
NETWORK = "10.213.77"
BRIDGE_ADDRESS = f"{NETWORK}.254"
GONE_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Namespace:
    name: str
    address: str

    def command(self, *command: str) -> list[str]:
        """Runs the command within the namespace."""
        return ["ip", "netns", "exec", self.name, *command]

    def kill(self) -> None:
        """Kills every process in it, and returns when all have ended."""
        while found := self._processes():
            for process in found:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            wait_for_ends(found, GONE_WITHIN_S)

    def _processes(self) -> list[psutil.Process]:
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [process for pid in listed.stdout.split() if (process := running(int(pid))) is not None]


def running(pid: int) -> psutil.Process | None:
    """The process, unless it has ended meanwhile."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.NoSuchProcess:
        return None


@contextmanager
def namespaces(count: int) -> Iterator[list[Namespace]]:
    """They exist for the length of the block; at its end everything in them is killed. This process is at the bridge.

    Raises:
        CalledProcessError: `ip` refused, because of missing rights or because they exist already.
    """
    nodes = [Namespace(f"{BRIDGE}-{number}", f"{NETWORK}.{number + 1}") for number in range(count)]
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("address", "add", f"{BRIDGE_ADDRESS}/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for node in nodes:
            add(node)
        yield nodes
    finally:
        for node in nodes:
            remove(node)
        subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True, check=False)


def add(node: Namespace) -> None:
    ip("netns", "add", node.name)
    ip("link", "add", node.name, "type", "veth", "peer", "name", "eth0", "netns", node.name)
    ip("link", "set", node.name, "master", BRIDGE, "up")
    ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        ip("-n", node.name, "link", "set", device, "up")


def remove(node: Namespace) -> None:
    """Does nothing if there is none."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    if node.name in [line.split()[0] for line in listed.splitlines()]:
        node.kill()
        # Linux takes seconds to remove the devices of a namespace that is gone, and the next run needs their names.
        ip("link", "delete", node.name)
        ip("netns", "delete", node.name)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True)
