"""The generator deployment: one vLLM engine per Serve replica."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments import logs
from deployments.failures import GenerationLost
from deployments.generation.generator_replica_base import GeneratorReplicaBase
from deployments.generation.serving.call_aborts import CallAborts
from deployments.generation.settings import EngineSettings, ResponseSettings
from deployments.images.store import RemoteImages
from deployments.instruments import flush_periodically
from deployments.policy.cluster import RayCluster, node_weights_folder
from deployments.policy.commands import LoadedWeights, ReplicaRegistration
from deployments.policy.node_files import NodeWeights
from deployments.protocols.generation import GenerationRequest
from deployments.protocols.model_server import CallsToAbort, ServedPart, ServedRequest
from deployments.protocols.weight_versions import refuse_other_version
from deployments.rpc.handle_calls import policy_store_client
from deployments.sessions.session_table import refuse_unrecordable
from deployments.sessions.store import session_store_client
from deployments.upstream.ray_serve.own_replica import call_at_shutdown, install
from deployments.upstream.ray_serve.serve_internals import metrics_report_interval_s
from deployments.workers.cleanup import claim_folder, claim_shared_memory

if TYPE_CHECKING:
    from deployments.generation.engine import VLLMEngine
    from deployments.generation.serving.layers import ServingLayers

_SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
"""Where vLLM makes about eight sockets for an engine, which it leaves behind."""
_MOST_CHOICES = "VLLM_MAX_N_SEQUENCES"
"""vLLM's own bound of a call's `n`. Its default is 16,384, and one call is on one replica."""
_SEED_BITS = 32
"""vLLM seeds numpy with it, which takes no more. The seeds of 100 replicas are equal with a probability of 1e-6."""


class GeneratorReplica(GeneratorReplicaBase):
    """Ready when its engine is warm and has the current weights; unhealthy when it broke, and Serve replaces it."""

    _engine: "VLLMEngine"

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: EngineSettings,
        policy_store: DeploymentHandle[Any],
        responses: ResponseSettings | None = None,
        sessions: DeploymentHandle[Any] | None = None,
        has_metrics: bool = True,
        images: DeploymentHandle[Any] | None = None,
    ) -> None:
        """Starts the engine, and waits until it has the current version.

        Args:
            responses: has the parsers of the answers to calls of OpenAI's and Anthropic's APIs.
            sessions: the session store; `None` for a service that keeps no sessions.
            has_metrics: whether the engine's metrics go to Ray's exporters.
            images: the image store; `None` for a service that takes no images.
        """
        # What vLLM prints stays in the log of Ray Serve.
        logs.configure(capture_output=False)
        install()
        os.environ.update({_MOST_CHOICES: "128"} | settings.process_variables)
        claim_shared_memory()
        if (folder := claim_folder()) is not None:
            os.environ.setdefault(_SOCKETS_VARIABLE, str(folder))
        with logs.logged_stage("vLLM is imported"):
            from vllm.config import StructuredOutputsConfig

            from deployments.generation.command_runner import CommandRunner
            from deployments.generation.engine import VLLMEngine
            from deployments.upstream.vllm.engine_progress import EngineMetrics

        seed = _replica_seed(settings.seed, replica_id())
        self._responses = responses or ResponseSettings()
        # With it the engine holds a JSON schema against the answer alone, and not against the reasoning before it.
        reasoning_parser = self._responses.reasoning_parser or ""
        engine_args = settings.engine_args() | {"seed": seed, "reasoning_parser": reasoning_parser}
        # Without a backend of its own an engine keeps to that of its first schema, whatever the next ones need.
        outputs: dict[str, Any] = {"backend": "xgrammar"} | engine_args.get("structured_outputs_config", {})
        engine_args["structured_outputs_config"] = StructuredOutputsConfig(**outputs)
        image_store = None if images is None else RemoteImages(images)
        with logs.logged_stage("The engine has its weights, graphs and cache, and is warm"):
            engine = await VLLMEngine.start(engine_args, settings.hang_timeout_s, image_store)
        super().__init__(engine)
        if sessions is not None:
            refuse_unrecordable(self._engine.llm.model_config.hf_config.model_type)
        if has_metrics:
            instruments = (EngineMetrics(replica_id()),)
            self._flushing = asyncio.create_task(flush_periodically(instruments, metrics_report_interval_s()))
        self._sessions = None if sessions is None else session_store_client(sessions)
        self._settings = settings
        self._serving: ServingLayers | None = None
        self._aborts = CallAborts(self._engine.interrupt)
        store = policy_store_client(policy_store)
        self._node_weights = NodeWeights(node_weights_folder(), RayCluster().node_id(), store.read_weights)
        await asyncio.to_thread(self._node_weights.join)
        self._commands = CommandRunner(
            self._engine, store, partial(registration_of, settings.workers), self._node_weights
        )
        self._running_commands = asyncio.create_task(self._commands.run())
        is_current = asyncio.create_task(self._commands.is_current.wait())
        with logs.logged_stage("The current weights are loaded"):
            await asyncio.wait((self._running_commands, is_current), return_when=asyncio.FIRST_COMPLETED)
            await self.check_health()
        call_at_shutdown(self.drain)

    async def answer(self) -> None:
        await super().answer()
        self._refuse_if_broken()
        if not await self._engine.is_alive():
            raise GenerationLost("The engine of the generator replica died; the replica is being replaced.")

    def _refuse_if_broken(self) -> None:
        if self._commands.broken is not None:
            raise GenerationLost("The generator replica broke while its weights were changed; it is being replaced.")

    def refuse_other_weights(self, request: GenerationRequest) -> None:
        self._refuse_if_broken()
        refuse_other_version(request, self._engine.weights.version_of(request.policy))

    def answer_call(self, request: ServedRequest) -> AsyncGenerator[ServedPart, None]:
        request = replace(request, arrived_at=time.monotonic())
        if self._serving is None:
            # Imported with the first call: the modules of vLLM's servers take a second.
            from deployments.generation.serving.layers import ServingLayers

            self._serving = ServingLayers(self._engine, self._settings, self._responses, self._sessions, self._aborts)
        return self._serving.answer(request)

    async def abort_calls(self, calls: CallsToAbort) -> None:
        """Ends calls of SGLang's API with the tokens that they have, also those that come later."""
        await self._aborts.abort(calls)

    def drain(self, bound_s: float) -> None:
        # The engine of a broken replica may be paused: its generations would wait all the time for nothing.
        super().drain(bound_s if self._commands.broken is None else 0.0)

    async def prefix_cache_tokens(self) -> tuple[int, int]:
        """Prompt tokens that the engine has looked up in its prefix cache so far, and those that it found there."""
        from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

        counted = {metric.name: metric.value for metric in get_metrics_snapshot() if isinstance(metric, Counter)}
        return counted["vllm:prefix_cache_queries"], counted["vllm:prefix_cache_hits"]

    async def check_health(self) -> None:
        """Raises what broke the engine, its outputs, or the task that runs the policy store's commands.

        An engine that hangs while it has work is noticed here.
        """
        await super().check_health()
        if self._running_commands.done():
            self._running_commands.result()
        # The task itself ends only when the store, which may be gone, has taken its report.
        if self._commands.broken is not None:
            raise RuntimeError(f"An update of the weights broke the replica: {self._commands.broken}")
        await self._engine.check_health()

    def __del__(self) -> None:
        if engine := getattr(self, "_engine", None):
            engine.shutdown()
        if serving := getattr(self, "_serving", None):
            serving.close()
        if node_weights := getattr(self, "_node_weights", None):
            node_weights.leave()


def replica_id() -> str:
    """The id of this replica; unique among all replicas, those that it replaces included."""
    return str(serve.get_replica_context().replica_id.unique_id)


def registration_of(workers: int, loaded: LoadedWeights) -> ReplicaRegistration:
    return ReplicaRegistration(replica_id(), ray.get_runtime_context().current_actor, workers, loaded)


def _replica_seed(configured: int | None, replica_id: str) -> int:
    """A seed in [0, 2^32) for the replica `replica_id`, mixed with the `configured` one.

    Engines with equal seeds draw equal random numbers, so that unseeded requests on two replicas would get equal
    tokens. vLLM passes the seed of a replica to all its workers, which must agree on each token.
    """
    digest = blake2b(repr((configured, replica_id)).encode(), digest_size=_SEED_BITS // 8).digest()
    return int.from_bytes(digest)
