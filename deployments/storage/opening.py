"""Opens the storage that the settings name."""

import logging
from pathlib import Path

import ray
from redis.asyncio import Redis

from deployments.storage.cluster_folder import cluster_folder
from deployments.storage.databases import SqliteStorage, file_of
from deployments.storage.redis_storage import RedisStorage
from deployments.storage.settings import StorageSettings
from deployments.storage.storage import Noun, Storage

REDIS_ANSWERS_WITHIN_S = 5.0
"""A Redis that is silent for longer is asked again."""
WITHOUT: dict[Noun, str] = {
    "job": "jobs: null for a service that refuses jobs and Idempotency-Keys",
    "session": "sessions: null for a service without sessions",
}
logger = logging.getLogger("rollout_service.storage")


class PasswordUnreadable(Exception):
    """There is no password in `redis_password_file`. The message is a sentence."""


class FolderNotShared(Exception):
    """The cluster has several nodes, and the config no Redis. The message is a sentence."""


def storage_of(settings: StorageSettings, noun: Noun) -> Storage:
    """The storage of a store of this kind.

    Raises:
        FolderNotShared: the cluster has several nodes and the config no Redis, unless the folder is there: then this is
            the node of the store that was here before.
        PasswordUnreadable: the password of the Redis cannot be read.
    """
    if settings.redis_url is not None:
        bound_s, password = REDIS_ANSWERS_WITHIN_S, password_of(settings, noun)
        redis = Redis.from_url(
            settings.redis_url, password=password, socket_timeout=bound_s, socket_connect_timeout=bound_s
        )
        return RedisStorage(redis, settings.redis_prefix, noun)
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    folder = Path(settings.folder).expanduser() if settings.folder else cluster_folder(noun)
    if (count := sum(bool(node["Alive"]) for node in nodes)) > 1:
        message = (
            f"The cluster has {count} nodes, and the {noun} store may be started again on another one, which has not "
            f"its folder. Set {noun}s.redis_url to a Redis that all nodes reach, or {WITHOUT[noun]}."
        )
        if not file_of(folder, noun).exists():
            raise FolderNotShared(message)
        logger.warning("%s", message)
    return SqliteStorage(folder, noun)


def password_of(settings: StorageSettings, noun: Noun) -> str | None:
    """The content of the file, but for the end of its line. Raises `PasswordUnreadable`."""
    if settings.redis_password_file is None:
        return None
    field = f"{noun}s.redis_password_file: {settings.redis_password_file!r}"
    try:
        password = Path(settings.redis_password_file).expanduser().read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is no text"
        raise PasswordUnreadable(f"{field} cannot be read ({reason}). Name a file with the password.") from error
    if not password:
        raise PasswordUnreadable(f"{field} is empty. Write the password of the Redis into it.")
    return password
