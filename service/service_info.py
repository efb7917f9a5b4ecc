"""Describes the service for `GET /info`."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from deployments.protocols import GeneratorDescription
from rollout_client.info_contract import ModelInfo, ServiceInfo, ServiceVersions, TokenizerInfo
from rollout_client.version import CONTRACT_VERSION
from service.settings import AdmissionSettings, Limits


def service_info(
    generator: GeneratorDescription,
    tokenizer: TokenizerInfo,
    limits: Limits,
    admission: AdmissionSettings,
    policy_version: int | None,
    tasks: Iterable[str],
) -> ServiceInfo:
    return ServiceInfo(
        model=ModelInfo(
            name=generator.model,
            revision=generator.revision,
            vocab_size=generator.vocab_size,
            max_model_len=generator.max_model_len,
        ),
        tokenizer=tokenizer,
        limits={
            "max_seq_len": generator.max_model_len,
            **limits.model_dump(),
            "admission": admission.model_dump(),
        },
        versions=ServiceVersions(
            service=version_of("rollout-service"),
            contract=CONTRACT_VERSION,
            engine=generator.engine,
            ray=version_of("ray"),
            transformers=version_of("transformers"),
        ),
        policy_version=policy_version,
        tasks=sorted(tasks),
    )


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        # A source tree that was never installed has no metadata.
        return "unknown"
