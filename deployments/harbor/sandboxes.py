"""Opens the provider that the settings name."""

from collections.abc import Callable, Mapping
from typing import Any

from deployments.harbor.settings import ProviderName, SandboxProviderSettings
from deployments.sandbox.providers.interface import ProviderUnusable, SandboxProvider
from deployments.sandbox.providers.local import LocalProvider

PROVIDERS: Mapping[ProviderName, Callable[..., SandboxProvider]] = {"local": LocalProvider}


def opened_provider(settings: SandboxProviderSettings) -> SandboxProvider:
    """Raises `ProviderUnusable`."""
    options: dict[str, Any] = settings.options
    try:
        return PROVIDERS[settings.provider](**options)
    except TypeError as error:
        raise ProviderUnusable(
            f"sandbox.options: the provider {settings.provider} does not take them: {error}."
        ) from error
