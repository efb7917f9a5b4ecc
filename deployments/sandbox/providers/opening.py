"""Opens a provider by its name. Its module is imported then: those of companies need packages of their own."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, Literal

from deployments.sandbox.providers.interface import ProviderUnusable, SandboxProvider

ProviderName = Literal["local", "docker", "kubernetes", "e2b", "daytona", "modal", "prime"]
"""Each is the name of a module beside this one, which has a class `<Name>Provider`."""


def opened(name: str, options: Mapping[str, Any]) -> SandboxProvider:
    """The provider of a `ProviderName`. Raises `ProviderUnusable`."""
    try:
        module = importlib.import_module(f"{__package__}.{name}")
    except ModuleNotFoundError as error:
        raise ProviderUnusable(
            f"the provider {name} needs the package {error.name}, which is not installed."
        ) from error
    provider = getattr(module, f"{name.capitalize()}Provider")
    try:
        inspect.signature(provider).bind(**options)
    except TypeError as error:
        known = ", ".join(inspect.signature(provider).parameters) or "none"
        raise ProviderUnusable(f"options: {error}; the provider {name} takes {known}.") from error
    opened_provider: SandboxProvider = provider(**options)
    return opened_provider
