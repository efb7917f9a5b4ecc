"""Network namespaces of this machine on one bridge: each is a node with an address of its own. Needs root and `ip`."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import sleep

BRIDGE = "chaos0"
NETWORK = "10.213.77"
BRIDGE_ADDRESS = f"{NETWORK}.254"
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Namespace:
    name: str
    address: str

    def command(self, *command: str) -> list[str]:
        """Runs the command within the namespace."""
        return ["ip", "netns", "exec", self.name, *command]

    def kill(self) -> None:
        """Kills every process in it, and returns when all have ended. Does nothing if there is no such namespace."""
        # A process leaves its namespace when it has closed its sockets, before it is a zombie.
        while pids := ip("netns", "pids", self.name, check=False).split():
            subprocess.run(["kill", "-KILL", *pids], capture_output=True, check=False)
            sleep(POLL_S)


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
            ip("netns", "add", node.name)
            ip("link", "add", node.name, "type", "veth", "peer", "name", "eth0", "netns", node.name)
            ip("link", "set", node.name, "master", BRIDGE, "up")
            ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", node.name, "link", "set", device, "up")
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            # Linux takes seconds to remove the devices of a namespace that is gone, and the next run needs their names.
            ip("link", "delete", node.name, check=False)
            ip("netns", "delete", node.name, check=False)
        ip("link", "delete", BRIDGE, check=False)


def ip(*arguments: str, check: bool = True) -> str:
    """What `ip` prints."""
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=check).stdout
