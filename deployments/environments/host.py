"""The environment deployment: hosts one task, answers batches of its steps, and checks the fields of its samples.

`RemoteEnvironment` (`service/remote/environment.py`) is the caller. The `extra_env_info` of samples is checked with the
environment's own model before anything is generated for them.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError

from deployments import logs
from deployments.environments.step_runner import CANCELLED, StepRunner
from deployments.failures import EnvironmentLost
from deployments.images.book import ImagesSettings
from deployments.images.checks import ObservedImages
from deployments.images.store import RemoteImages
from deployments.models.settings import ChatModelSettings, UserSimulatorSettings
from deployments.protocols.environments import RefusedField, StepRequest, TaskDescription
from deployments.rpc.autoscaling import stats_of
from deployments.rpc.batching import BatchResults, bytes_of_step_result, results_as_completed
from deployments.rpc.liveness import CallerWatch, Heartbeats, Listener
from deployments.upstream.ray_serve.direct_ingress import running_address
from deployments.upstream.ray_serve.own_replica import install
from deployments.workers.cleanup import claim_folder, claim_shared_memory
from rollout_env import ChatModel, ModelUser, RewardModel, StepOutcome, TaskEnvironment
from rollout_env.apart import certified_apart
from rollout_env.certificate import hash_in
from rollout_env.certify import PanelSettings
from rollout_env.environment import forks_sessions, has_a_start, has_sessions
from rollout_env.loading import certified_environment, load_environment
from rollout_env.steps import abandoned_threads, call, is_plain
from rollout_env.worth import NotCertified

_MOST_REFUSED_FIELDS = 20
logger = logging.getLogger("rollout_service.environments")


def _refused_fields(model: type[BaseModel], extra_env_infos: Sequence[dict[str, Any]]) -> list[RefusedField]:
    """The first `_MOST_REFUSED_FIELDS` fields that the model does not accept."""
    refused: list[RefusedField] = []
    for place, extra_env_info in enumerate(extra_env_infos):
        try:
            model.model_validate(extra_env_info)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False)
            refused += [RefusedField(place, one["loc"], one["msg"].removeprefix("Value error, ")) for one in problems]
        except Exception as error:
            # A fault of the environment, not of the sample. The step meets it again, and its failure says so.
            logger.warning("The fields of a sample could not be checked.", exc_info=error)
    return refused[:_MOST_REFUSED_FIELDS]


_MOST_ABANDONED_THREADS = 256
_CALLER_GONE = EnvironmentLost("The step was ended: the ingress replica that wanted it has died.")
_NO_MODELS: Mapping[str, Any] = MappingProxyType({})


class _TooManyThreads(Exception):
    """Too many plain steps hang in their threads. The message has their number and the task."""


class EnvironmentHost:
    """One replica of one task's environment. Keeps no state of a rollout between its steps, except its session."""

    def __init__(
        self,
        task_name: str,
        import_path: str,
        arguments: dict[str, Any],
        step_timeout_s: float | None,
        chat_models: Mapping[str, ChatModelSettings] = _NO_MODELS,
        reward_models: Mapping[str, Any] = _NO_MODELS,
        images: Any = None,
        images_settings: ImagesSettings | None = None,
        user_simulator: UserSimulatorSettings | None = None,
        certificate: str | None = None,
    ) -> None:
        """Makes the environment and its user.

        Args:
            reward_models: the handles of their deployments, by name.
            images: the handle of the image store; None where the service takes no images.
            certificate: a file with the certificate that the environment must have.

        Raises:
            CertificateRefused: the file has no certificate of this environment.
            EnvironmentNotLoadable: the environment cannot be made.
            KeyMissing: an environment variable with the key of a model is not set.
        """
        logs.configure()
        claim_shared_memory()
        claim_folder()
        self._task_name = task_name
        self._environment = load_environment(import_path, arguments)
        self._made_by = import_path, arguments
        self._certificate = certificate and hash_in(Path(certificate), self._environment, arguments)
        chats, rewards = dict[str, ChatModel](), dict[str, RewardModel]()
        if chat_models or reward_models:
            # Imported here: httpx takes a tenth of a second of each start, where rich is installed.
            from deployments.models.clients import HttpChatModel, RemoteRewardModel

            chats |= {name: HttpChatModel(settings, name, running_address) for name, settings in chat_models.items()}
            rewards |= {name: RemoteRewardModel(name, handle) for name, handle in reward_models.items()}
        self._environment.use_models(chats, rewards)
        self._asks = bool(chats or rewards or user_simulator)
        if user_simulator is not None:
            played = user_simulator.model_dump(exclude={"model"})
            self._environment.use_user(ModelUser(chats[user_simulator.model], **played))
        observed = None if images_settings is None else ObservedImages(RemoteImages(images), images_settings)
        self._steps = StepRunner(self._environment, task_name, step_timeout_s, observed)
        self._heartbeats = Heartbeats()
        self._callers_watch = CallerWatch(partial(self._steps.fail, failure=_CALLER_GONE))
        install(self.drain)

    async def step(
        self, requests: list[StepRequest], caller: str = "", named: str = ""
    ) -> AsyncGenerator[BatchResults[StepOutcome], None]:
        """Runs the steps and yields results as they finish, those of one event-loop iteration together.

        A step that fails yields its failure and does not affect the other steps. Every `HEARTBEAT_S` seconds a caller
        gets an item without results, on one of its streams with the same `named`.

        Args:
            caller: the same for all calls of one ingress replica, and different from all others'.
            named: the replica that the call named.
        """
        # Thousands of steps that fail alike leave one traceback in the log, and a line each.
        logged_failures: set[str] = set()
        steps = [self._steps.start(request, logged_failures) for request in requests]
        wake = asyncio.Event()
        ids = [request.step_id for request in requests]
        with self._heartbeats.open_stream(Listener(caller, named), wake), self._callers_watch.working(caller, ids):
            async with aclosing(results_as_completed(steps, CANCELLED, bytes_of_step_result, wake)) as finished:
                async for results in finished:
                    yield results

    async def abort(self, step_ids: list[str]) -> None:
        """Cancels steps whose callers have gone, while others of their call continue. Unknown ids are ignored."""
        self._steps.abort(step_ids)

    async def release(self, session_ids: list[str]) -> None:
        """Closes the sessions of rollouts that have ended. Unknown ids are ignored."""
        self._steps.release(session_ids)

    def drain(self, bound_s: float) -> None:
        """Lets steps go on for `bound_s` seconds; then the callers have them made at other replicas.

        Serve routes no calls here any more. A session ends with the replica: its rollout is played anew, if it may be.
        """
        asyncio.get_running_loop().call_later(bound_s, self._steps.hand_off)

    async def answer(self) -> None:
        """Answers while the replica's event loop is alive."""

    async def check_health(self) -> None:
        """Serve calls this, and replaces the replica when it raises.

        Raises:
            _TooManyThreads: too many plain steps hang in their threads, which only the end of the process can end.
        """
        if (count := abandoned_threads()) >= _MOST_ABANDONED_THREADS:
            raise _TooManyThreads(f"{count} steps of task {self._task_name} hang in their threads.")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return stats_of(self._steps.load)

    async def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """The environment's example samples, with their `task_name`. Raises what the environment raises."""
        samples = await call(self._environment.example_samples, count, seed)
        return [{**sample, "task_name": self._task_name} for sample in samples]

    async def describe(self) -> TaskDescription:
        return TaskDescription(
            task_name=self._task_name,
            description=self._environment.description,
            fields=self._environment.ExtraEnvInfo.model_json_schema(),
            example=(await self.example_samples(1, 0))[0],
            tools=list(self._environment.tools),
            has_start=has_a_start(type(self._environment)),
            has_sessions=has_sessions(type(self._environment)),
            forks_sessions=forks_sessions(self._environment),
            sample_count=self._environment.sample_count,
            certificate=self._certificate,
        )

    async def certify(self, settings: PanelSettings) -> dict[str, Any]:
        """The certificate of the task, as a document. Its panel plays in a process of its own, on this node.

        Raises:
            NotCertified: the task asks models, which that process has not; or it has ended early.
        """
        if self._asks:
            raise NotCertified(
                f"The task {self._task_name} asks models or a user of this service: certify it in a test."
            )
        import_path, arguments = self._made_by
        make = certified_environment(import_path, arguments)
        return (await certified_apart(self._task_name, make, arguments, settings)).document()

    async def refused_fields(self, extra_env_infos: list[dict[str, Any]]) -> list[RefusedField]:
        """The first fields that the environment does not accept."""
        return _refused_fields(self._environment.ExtraEnvInfo, extra_env_infos)

    def __del__(self) -> Awaitable[None] | None:
        """Closes the environment, once. Serve calls this when the replica ends, and awaits what it returns."""
        environment: TaskEnvironment | None = self.__dict__.pop("_environment", None)
        if environment is None:
            return None
        if has_sessions(type(environment)) or not is_plain(environment.close):
            return self._close(environment)
        with self._logged_failure():
            environment.close()
        return None

    async def _close(self, environment: TaskEnvironment) -> None:
        """Closes the sessions first."""
        await self._steps.close()
        with self._logged_failure():
            await call(environment.close)

    @contextmanager
    def _logged_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            context = {"task_name": self._task_name}
            logger.warning("The environment of task %s was not closed.", self._task_name, exc_info=error, extra=context)
