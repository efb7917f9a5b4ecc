"""Serves the HTTP application over scripted parts for a browser, until its standard input ends.

    python -m tests.service.ui.serve_page [--key]

Prints a line of JSON: the address, and with `--key` the key that the service then asks for.
"""

import argparse
import asyncio
import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import uvicorn
from fastapi import FastAPI

from deployments.protocols.replicas import GeneratorDescription
from deployments.rollout_records.book import RolloutRecordsSettings
from deployments.rollout_records.store import RolloutRecordStore
from rollout_client.contract.policy import PolicyState, ReplicaPolicy, VersionInfo
from service.access.access_control import AccessControl
from service.access.keys import hash_of, new_key
from service.admission.admission import Admission
from service.remote.policy import RemotePolicy
from service.rollout_records.recorder import RolloutRecorder
from service.rollout_records.trainer_reports import TrainerReports
from service.rollout_requests.episodes import EpisodeFactory
from service.rollout_requests.rollout_service import RolloutService
from service.rollout_requests.task_samples import TaskSampler
from service.settings import AccessSettings, AdmissionSettings, RequestLimits
from tests.fakes.policy_store import ScriptedStore
from tests.service.scripted_http import VOCAB_SIZE, app_of, tokenizer
from tests.service.ui.played_parts import TalkingGenerator, tasks
from tests.service.ui.scripted_metrics import scripted_metrics

DELAY_S = 0.05
MAX_MODEL_LEN = 2000


class StoreWithReplicas(ScriptedStore):
    """Two replicas, of which one has the new weights."""

    async def state(self, checksums_within_s: float) -> PolicyState:
        now = datetime.now(UTC)
        versions = [
            VersionInfo(version=0, kind="initial"),
            VersionInfo(version=6, kind="full", size_bytes=1_780_000, created_at=now - timedelta(minutes=4)),
            VersionInfo(version=7, kind="delta", base=6, size_bytes=1_780_000, created_at=now - timedelta(seconds=40)),
        ]
        replicas = [ReplicaPolicy(replica_id="g1", version=7), ReplicaPolicy(replica_id="g2", version=6)]
        return PolicyState(current=7, updating_to=None, versions=versions, replicas=replicas)


def scripted_app(access: AccessControl) -> FastAPI:
    environments, limits = tasks(), RequestLimits()
    description = GeneratorDescription("tiny", MAX_MODEL_LEN, VOCAB_SIZE)
    factory = EpisodeFactory(frozenset(environments), description, tokenizer, limits)
    policy = RemotePolicy(StoreWithReplicas())  # type: ignore[arg-type]
    admission = Admission(AdmissionSettings(), MAX_MODEL_LEN, lambda: 1)
    sampler = TaskSampler(environments)
    generator, store = TalkingGenerator(DELAY_S), RolloutRecordStore(RolloutRecordsSettings())
    in_process: Any = store
    recorder = RolloutRecorder(in_process)
    # Of two replicas none is ever compared with the others.
    not_compared: Any = None
    reports = TrainerReports(in_process, not_compared, lambda: {"": 7})
    rollouts = RolloutService(generator, environments, policy, factory, limits, admission, sampler, records=recorder)
    return app_of(generator, rollouts, access, records=recorder, reports=reports)


def access_of(folder: Path, key: str | None) -> AccessControl:
    if key is None:
        return AccessControl.of(AccessSettings())
    path = folder / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": "user", "sha256": hash_of(key), "scopes": ["rollout", "read"]}]}))
    return AccessControl.of(AccessSettings(keys_file=str(path)))


async def serve(access: AccessControl, key: str | None) -> None:
    server = uvicorn.Server(uvicorn.Config(scripted_app(access), port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    sys.stdout.write(json.dumps({"url": f"http://127.0.0.1:{port}", "key": key}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--key", action="store_true")
    key = new_key() if parser.parse_args().key else None
    with TemporaryDirectory() as folder, patch("service.routes.status.all_metrics", scripted_metrics):
        asyncio.run(serve(access_of(Path(folder), key), key))


if __name__ == "__main__":
    main()
