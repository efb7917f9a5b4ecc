"""Opens a provider by its name. Its module is imported then: those of companies need packages of their own."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from deployments.sandbox.providers.interface import ProviderUnusable, SandboxProvider

PROVIDERS: Mapping[str, str] = {
    "local": "deployments.sandbox.providers.local:LocalProvider",
    "docker": "deployments.sandbox.providers.docker:DockerProvider",
    "kubernetes": "deployments.sandbox.providers.kubernetes:KubernetesProvider",
    "e2b": "deployments.sandbox.providers.e2b:E2bProvider",
    "daytona": "deployments.sandbox.providers.daytona:DaytonaProvider",
    "modal": "deployments.sandbox.providers.modal:ModalProvider",
    "prime": "deployments.sandbox.providers.prime:PrimeProvider",
}


def opened(name: str, options: Mapping[str, Any]) -> SandboxProvider:
    """Raises `ProviderUnusable`."""
    module_name, _, class_name = PROVIDERS[name].partition(":")
    try:
        provider = getattr(importlib.import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        raise ProviderUnusable(
            f"the provider {name} needs the package {error.name}, which is not installed."
        ) from error
    try:
        inspect.signature(provider).bind(**options)
    except TypeError as error:
        known = ", ".join(inspect.signature(provider).parameters) or "none"
        raise ProviderUnusable(f"options: {error}; the provider {name} takes {known}.") from error
    opened_provider: SandboxProvider = provider(**options)
    return opened_provider
