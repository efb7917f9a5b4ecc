"""The service that a measurement of the scale benchmark runs, and the changes of its config."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import aiohttp
from ray.serve.schema import ServeDeploySchema
from rich.console import Console

from service.startup.config import free_port
from service.startup.local_service import local_service

Result = TypeVar("Result")
Measure = Callable[[aiohttp.ClientSession], Coroutine[Any, Any, Result]]


def measured(settings: ServeDeploySchema, measure: Measure[Result], console: Console) -> Result:
    """Starts the service, measures, and ends it."""

    async def measure_at(url: str) -> Result:
        unlimited = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, connector=unlimited, timeout=aiohttp.ClientTimeout(None)) as session:
            return await measure(session)

    settings.http_options.port = free_port()
    with local_service(settings, console) as url:
        return asyncio.run(measure_at(url))


def with_timing(
    settings: ServeDeploySchema, timing: Mapping[str, Any], replicas: int | None = None
) -> ServeDeploySchema:
    """A copy of the config with these fields of `engine.simulated` and this number of generator replicas."""
    changed = settings.model_copy(deep=True)
    [application] = changed.applications
    application.args["engine"]["simulated"] |= timing
    for deployment in application.deployments:
        if deployment.name == "Generator" and replicas is not None:
            deployment.num_replicas = replicas
    return changed
