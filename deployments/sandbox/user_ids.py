"""User ids that no other process of this machine has, for a service that runs as root."""

import random
import socket

FIRST_UID, LAST_UID = 60706, 61183
"""systemd, whose table of user ids is the only one there is for this range, leaves these unused."""


class NoUserIdLeft(Exception):
    """All user ids for sandboxes are taken on this machine."""


class UserIdLease:
    """A user id, held until `close` or the end of this process."""

    def __init__(self) -> None:
        """Raises `NoUserIdLeft`."""
        # Containers of one machine do not see each other's names, but the kernel counts their processes together.
        for uid in random.sample(range(FIRST_UID, LAST_UID + 1), LAST_UID + 1 - FIRST_UID):
            # The kernel gives an abstract name to one socket at a time, and takes it back when the process ends.
            name = socket.socket(socket.AF_UNIX)
            try:
                name.bind(f"\0rollout-sandbox-uid-{uid}")
            except OSError:
                name.close()
                continue
            self.uid = uid
            self._name = name
            return
        raise NoUserIdLeft(f"All {LAST_UID + 1 - FIRST_UID} user ids for sandboxes are taken on this machine.")

    def close(self) -> None:
        self._name.close()
