"""Ray's token authentication: whoever has no token cannot call the cluster, which runs what it is sent.

Ray turns it on by itself where `ray.init` starts a cluster on one machine, and writes the token into a file that every
user of the machine may read. Here it is on unless RAY_AUTH_MODE says otherwise, and the file is its owner's alone.
"""

import logging
import os
import secrets
import stat
import tempfile
from pathlib import Path

from deployments.upstream.ray_serve.ray_internals import read_environment_again
from service.startup.commands import ServiceNotStarted

MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
TOKEN_BYTES = 32
OTHERS = stat.S_IRWXG | stat.S_IRWXO
logger = logging.getLogger("rollout_service.startup")


def require_cluster_token() -> None:
    """Makes this process, and the cluster that it starts, use a token; makes the token if there is none.

    Raises:
        ServiceNotStarted: the token's file cannot be made, or cannot be closed to other users.
    """
    mode = os.environ.setdefault(MODE, "token")
    # Ray has read its environment when it was imported, which may have been before `serve.env` was.
    read_environment_again()
    if mode.lower() != "token":
        logger.warning("%s is %s: whoever reaches a port of Ray can run code here. Unset it.", MODE, mode)
        return
    if os.environ.get(TOKEN):
        return
    path = token_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_token(path)
        close_to_others(path)
    except OSError as error:
        raise ServiceNotStarted(
            f"The token of the Ray cluster cannot be kept in {path}: {error.strerror}. "
            f"Name another file in {TOKEN_PATH}."
        ) from error


def token_path() -> Path:
    """The file from which Ray reads the token."""
    given = os.environ.get(TOKEN_PATH)
    return Path(given).expanduser() if given else Path.home() / ".ray" / "auth_token"


def make_token(path: Path) -> None:
    """Writes a new token, unless the file is there. Nobody reads a part of it, also while two services start."""
    if path.exists():
        return
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".token-") as new:
        new.write(secrets.token_hex(TOKEN_BYTES))
        new.flush()
        os.fsync(new.fileno())
        try:
            os.link(new.name, path)
        except FileExistsError:
            return


def close_to_others(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & OTHERS:
        path.chmod(mode & ~OTHERS)
        logger.warning("%s was open to other users, and is no longer.", path)
