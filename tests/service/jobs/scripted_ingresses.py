"""Several ingress replicas that share a job store, in one process and in virtual time; any of them can be killed."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
from fastapi import FastAPI

from deployments.data.rows import DataReader
from deployments.failures import JobStoreLost
from deployments.jobs.registry import JobsSettings
from deployments.jobs.store import JobStore
from deployments.protocols.generation import Environment, Generator
from deployments.protocols.replicas import GeneratorDescription
from rollout_client import AsyncRolloutClient
from rollout_env import StepOutcome
from service.access.access_control import OPEN_TO_ALL, AccessControl
from service.admission.admission import Admission
from service.jobs.runner import JobRunner
from service.remote.policy import RemotePolicy
from service.rollout_records.recorder import RolloutRecorder
from service.rollout_requests.episodes import EpisodeFactory
from service.rollout_requests.rollout_service import RolloutService
from service.rollout_requests.task_samples import TaskSampler
from service.rollouts.progress import UNOBSERVED, RolloutObserver
from service.settings import AdmissionSettings, RequestLimits
from tests import virtual_time
from tests.fakes.policy_store import ScriptedStore
from tests.fakes.storage import Kept, ScriptedStorage
from tests.service.rollouts.playing import RandomEnvironment, RandomGenerator
from tests.service.scripted import ScriptedEnvironment, ScriptedGenerator, outcome
from tests.service.scripted_http import app_of, named, tokenizer

MAX_MODEL_LEN = 60
DESCRIPTION = GeneratorDescription("tiny", MAX_MODEL_LEN, 262)
LIMITS = RequestLimits(max_body_bytes=2**16)
SETTINGS = JobsSettings(lease_s=5, keep_s=3600)
ENDS_WITHIN_S = 300.0


class StoreLink:
    """The store as one ingress replica reaches it: not at all once the replica was killed, or while the store is
    away."""

    def __init__(self, cluster: "ScriptedIngresses") -> None:
        self._cluster = cluster
        self.is_cut = False
        self._restored = asyncio.Event()

    def restore(self) -> None:
        """Ends what `is_cut` has begun: the calls that hang fail."""
        self.is_cut = False
        self._restored.set()

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*arguments: Any) -> Any:
            await asyncio.sleep(0.001)
            if method == self._cluster.arrives_late:
                await asyncio.sleep(3)
            if self.is_cut:
                await self._restored.wait()
                raise JobStoreLost("The connection to the job store broke.")
            if self._cluster.store_is_away:
                raise JobStoreLost("The job store died during the call.")
            answer = await getattr(self._cluster.store, method)(*arguments)
            if method == self._cluster.answers_late:
                await asyncio.sleep(1)
            if method == self._cluster.dies_after and answer is not None:
                self._cluster.dies_after = ""
                self._cluster.start_store()
                raise JobStoreLost("The job store died during the call.")
            if method == self._cluster.away_after and answer is not None:
                self._cluster.away_after = ""
                self._cluster.store_is_away = True
                asyncio.get_running_loop().call_later(3, self._cluster.start_store)
            return answer

        return call


class WatchedRunner(JobRunner):
    """Shows what it plays, and can be killed."""

    @property
    def playing(self) -> list[str]:
        return list(self._players)

    def kill(self) -> None:
        for task in (self._following, *(player.task for player in self._players.values())):
            task.cancel()


class ScriptedIngress:
    def __init__(self, cluster: "ScriptedIngresses", access: AccessControl, admission: AdmissionSettings) -> None:
        factory = EpisodeFactory(frozenset(cluster.environments), DESCRIPTION, tokenizer, LIMITS)
        policy = RemotePolicy(ScriptedStore())  # type: ignore[arg-type]
        self.link = StoreLink(cluster)
        parts = cluster.generator, cluster.environments, policy, factory, LIMITS, Admission(admission, MAX_MODEL_LEN)
        sampler = TaskSampler(cluster.environments, cluster.data, {"task"} if cluster.data else frozenset())
        records = None if cluster.records is None else RolloutRecorder(cluster.records, virtual_time.now)
        self.rollouts = RolloutService(*parts, sampler, observer=cluster.observer, records=records)
        self.jobs = WatchedRunner(self.link, self.rollouts, access, SETTINGS.max_body_bytes)  # type: ignore[arg-type]
        self.app: FastAPI = app_of(cluster.generator, self.rollouts, access, jobs=self.jobs)

    def kill(self) -> None:
        """Nothing that it does from now on reaches anybody."""
        self.link.is_cut = True
        self.jobs.kill()


class ScriptedIngresses:
    def __init__(
        self,
        replicas: int = 2,
        generator: Generator | None = None,
        environment: Environment | None = None,
        access: AccessControl = OPEN_TO_ALL,
        admission: AdmissionSettings | None = None,
        data: DataReader | None = None,
        observer: RolloutObserver = UNOBSERVED,
        records: Any = None,
    ) -> None:
        """Args: `data` are those of `task`; `records` is the store of the records of rollouts."""
        self.data = data
        self.observer, self.records = observer, records
        self.kept = Kept()
        self.store_is_away = False
        self.dies_after = ""
        """The method of the store that it carries out and does not answer, because it dies."""
        self.away_after = ""
        """The method of the store after whose answer it is away for 3 s."""
        self.arrives_late = ""
        """The method of the store whose calls are 3 s under way."""
        self.answers_late = ""
        """The method of the store whose answers are a second under way."""
        self.start_store()
        self.generator: Any = generator or RandomGenerator()
        self.environments = {"task": environment or RandomEnvironment()}
        self._access, self._admission = access, admission or AdmissionSettings()
        self.replicas = [self._new() for _ in range(replicas)]

    def _new(self) -> ScriptedIngress:
        return ScriptedIngress(self, self._access, self._admission)

    def start_store(self) -> None:
        """A store that knows what the one before it has stored."""
        self.storage = ScriptedStorage(self.kept)
        self.store = JobStore(SETTINGS, self.storage, virtual_time.now)
        self.store_is_away = False

    def kill(self, replica: int) -> None:
        """Serve starts another one in its place."""
        self.replicas[replica].kill()
        self.replicas[replica] = self._new()

    def client(self, replica: int) -> AsyncRolloutClient:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(self.replicas[replica].app), base_url="http://service")
        return AsyncRolloutClient(http_client=http)

    async def request(self, replica: int, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.replicas[replica].app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://service", timeout=None) as http:
            return await http.request(method, path, **options)

    async def post(self, replica: int, body: dict[str, Any], path: str = "/rollout", **headers: str) -> httpx.Response:
        """An underscore in the name of a header stands for a hyphen."""
        return await self.request(replica, "POST", path, content=json.dumps(body), headers=named(headers))

    async def submit(self, body: dict[str, Any], **headers: str) -> str:
        """The id of a job that is posted to the first replica."""
        return str((await self.post(0, body, "/jobs", **headers)).json()["job_id"])

    async def all_jobs(self) -> list[dict[str, Any]]:
        jobs: list[dict[str, Any]] = (await self.request(0, "GET", "/jobs")).json()["jobs"]
        return jobs

    async def samples(self, job_id: str) -> list[dict[str, Any]]:
        """Of all events, with their positions."""
        return [each for event in await self.events(job_id) for each in event.get("samples", ())]

    async def ended(self, job_id: str) -> dict[str, Any]:
        """The state of the job when it has ended."""
        async with asyncio.timeout(ENDS_WITHIN_S):
            while True:
                state: dict[str, Any] = (await self.request(0, "GET", f"/jobs/{job_id}")).json()
                if state.get("state") in ("completed", "failed"):
                    return state
                await asyncio.sleep(0.5)

    async def events(self, job_id: str, replica: int = 0, **query: Any) -> list[dict[str, Any]]:
        response = await self.request(replica, "GET", f"/jobs/{job_id}/events", params=query)
        assert response.status_code == 200, response.text
        return [json.loads(line) for line in response.text.splitlines() if line]


def run(scenario: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return virtual_time.run(scenario())


def slow_cluster(delay_s: float = 40, *script: StepOutcome, replicas: int = 2, **options: Any) -> ScriptedIngresses:
    """Each generation takes so long; by default a rollout has one."""
    environment = ScriptedEnvironment(script or [outcome("x", terminated=True)])
    return ScriptedIngresses(replicas, ScriptedGenerator(["abc"], delay_s=delay_s), environment, **options)


def request_of(groups: int = 2, **options: Any) -> dict[str, Any]:
    samples = [
        {"task_name": "task", "messages": [{"role": "user", "content": "q" * (1 + place)}], "id": f"s{place}"}
        for place in range(groups)
    ]
    defaults = {"num_generations": 2, "sampling": {"max_new_tokens": 6}, "max_rollout_turns": 5}
    return {"samples": samples, **defaults, **options}
