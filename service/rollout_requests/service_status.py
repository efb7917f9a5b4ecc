"""Whether a rollout would work (`GET /readyz`), and what the service is (`GET /info`).

Readiness asks each deployment, replica by replica, and names what does not answer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal, NamedTuple

from deployments.failures import RolloutFailure
from deployments.protocols.generation import Environment, Generator
from deployments.protocols.model_server import public_model_name
from deployments.rpc.background_tasks import SharedCalls
from rollout_client.contract.info import DegradedPart, ModelInfo, ServiceInfo, ServiceVersions
from rollout_client.version import CONTRACT_VERSION
from service.rollout_requests.episodes import version_of
from service.rollouts.retries import with_timeout

if TYPE_CHECKING:
    from service.rollout_requests.rollout_service import RolloutService

NOT_LIMITS = {
    *("model", "revision", "vocab_size", "max_model_len", "engine", "image_token_ids", "settings_hash"),
    *("model_names", "dtype", "transfer_backend"),
}
"""Fields of a `GeneratorDescription` that `ServiceInfo` has elsewhere, or that only requests and results need. The
others say what one engine can do."""


def service_info(rollouts: "RolloutService") -> ServiceInfo:
    """The description of the service, without what other rooms add."""
    generator = rollouts.episode_factory.generator
    return ServiceInfo(
        model=ModelInfo(
            name=public_model_name(generator.model),
            revision=generator.revision,
            vocab_size=generator.vocab_size,
            max_model_len=generator.max_model_len,
        ),
        tokenizer=rollouts.episode_factory.tokenizer.info,
        limits={
            "max_seq_len": generator.max_model_len,
            **{name: value for name, value in asdict(generator).items() if name not in NOT_LIMITS},
            **rollouts.limits.model_dump(),
            "admission": rollouts.admission.settings.model_dump(),
        },
        versions=ServiceVersions(
            service=version_of("rollout-service"),
            contract=CONTRACT_VERSION,
            engine=generator.engine,
            ray=version_of("ray"),
            transformers=version_of("transformers"),
        ),
        policy_version=rollouts.policy.version,
        tasks=sorted(rollouts.environments),
    )


ANSWER_WITHIN_S = 5.0
StorePart = Literal["data", "policy", "jobs", "sessions", "images"]
logger = logging.getLogger("rollout_service.readiness")


class _Check(NamedTuple):
    """One question, whether a deployment or one of its replicas serves."""

    part: Literal["generator", "environment", StorePart]
    answer: Awaitable[object]
    task_name: str | None = None
    replica: str | None = None
    """`None` for whichever is asked, where none is known."""

    @property
    def who(self) -> str:
        of = {"generator": "generator", "environment": f"environment {self.task_name!r}"}
        deployment = of.get(self.part, f"deployment {self.part.title()}")
        return f"replica {self.replica} of the {deployment}" if self.replica else deployment


class Readiness:
    """Asks every replica of the generator and of the environments, and each store, all at once, whether it serves.

    Ready means: a generator replica and a replica of at least one environment answer. Concurrent callers share one
    check.
    """

    def __init__(
        self,
        generator: Generator,
        environments: Mapping[str, Environment],
        stores: Mapping[StorePart, Callable[[], Awaitable[object]]],
    ) -> None:
        """Checks nothing yet.

        Args:
            environments: also the deployments that run agents, by the names of both.
            stores: calls of the deployments of one replica, without which rollouts can still be played.
        """
        self._generator = generator
        self._environments = environments
        self._stores = stores
        self._checking = SharedCalls(lambda _: self._check_all())

    async def check(self) -> list[DegradedPart]:
        """The parts that do not answer, although rollouts can be played.

        Raises:
            RolloutFailure: the generator, or every environment, does not answer within `ANSWER_WITHIN_S`; the message
                names it.
        """
        return await self._checking.result()

    async def _check_all(self) -> list[DegradedPart]:
        checks = _checks("generator", self._generator)
        for name, environment in self._environments.items():
            checks += _checks("environment", environment, name)
        checks += [_Check(part, ask()) for part, ask in self._stores.items()]
        failures = await asyncio.gather(*(_failure_of_check(check.who, check.answer) for check in checks))
        serving = {check.part for check, failure in zip(checks, failures, strict=True) if failure is None}
        degraded = [
            DegradedPart(part=check.part, task_name=check.task_name, replica_id=check.replica, reason=str(failure))
            for check, failure in zip(checks, failures, strict=True)
            if failure is not None
        ]
        for part in ("generator", "environment"):
            if part not in serving:
                raise RolloutFailure(" ".join(lost.reason for lost in degraded if lost.part == part))
        return degraded


def _checks(
    part: Literal["generator", "environment"], asked: Generator | Environment, task_name: str | None = None
) -> list[_Check]:
    replicas = asked.replicas()
    if not replicas:
        return [_Check(part, asked.describe(), task_name)]
    return [_Check(part, asked.answer(replica), task_name, replica) for replica in replicas]


async def _failure_of_check(who: str, answer: Awaitable[object]) -> RolloutFailure | None:
    """Why there is no answer within `ANSWER_WITHIN_S`; `None` if there is one."""
    try:
        await with_timeout(ANSWER_WITHIN_S, answer, f"The answer of the {who}")
    except RolloutFailure as failure:
        return failure
    except Exception as error:
        # Anyone may ask whether the service is ready: the text of an exception stays in the log.
        logger.warning("The %s cannot answer.", who, exc_info=error)
        return RolloutFailure(f"The {who} cannot answer: {type(error).__name__}.")
    return None
