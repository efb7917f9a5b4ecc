"""Opens the storage that the settings name."""

import logging
from pathlib import Path

import ray
from redis.asyncio import Redis

from deployments.storage.cluster_folder import cluster_folder
from deployments.storage.redis_storage import RedisStorage
from deployments.storage.settings import StorageSettings
from deployments.storage.sqlite_storage import SqliteStorage, file_of
from deployments.storage.storage import Noun, Storage

REDIS_ANSWERS_WITHIN_S = 5.0
"""A Redis that is silent for longer is asked again."""
WITHOUT: dict[Noun, str] = {
    "job": "jobs: null for a service that refuses jobs and Idempotency-Keys",
    "session": "sessions: null for a service without sessions",
}
logger = logging.getLogger("rollout_service.storage")


class FolderNotShared(Exception):
    """The cluster has several nodes, and the config no Redis. The message is a sentence."""


def storage_of(settings: StorageSettings, noun: Noun) -> Storage:
    """Raises `FolderNotShared`, unless the folder is there: then this is the node of the store that was here before."""
    if settings.redis_url is not None:
        bound_s = REDIS_ANSWERS_WITHIN_S
        redis = Redis.from_url(settings.redis_url, socket_timeout=bound_s, socket_connect_timeout=bound_s)
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
