"""Describes the service for `GET /info`."""

from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from deployments.protocols import GeneratorDescription
from deployments.serving_records import public_model_name
from rollout_client.info_contract import ModelInfo, ServiceInfo, ServiceVersions, TokenizerInfo
from rollout_client.version import CONTRACT_VERSION
from service.settings import AdmissionSettings, Limits

NOT_LIMITS = {"model", "revision", "vocab_size", "max_model_len", "engine"}
"""Fields of a `GeneratorDescription` that `ServiceInfo` has elsewhere. The others say what one engine can do."""


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
            name=public_model_name(generator.model),
            revision=generator.revision,
            vocab_size=generator.vocab_size,
            max_model_len=generator.max_model_len,
        ),
        tokenizer=tokenizer,
        limits={
            "max_seq_len": generator.max_model_len,
            **{name: value for name, value in asdict(generator).items() if name not in NOT_LIMITS},
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
