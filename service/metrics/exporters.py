"""The metrics of all replicas, from Ray's exporter on each node, whichever ingress replica asks."""

import asyncio
import logging
from typing import Any

import httpx
import ray

from service.metrics.exposition import merged

PREFIXES = ("ray_rollout_", "ray_vllm_", "ray_serve_")
"""Of the metrics of the rollouts, of the engines and of Ray Serve. Ray's exporters have many more, of its own."""
TIMEOUT_S = 5.0
logger = logging.getLogger("rollout_service.metrics")


class ExportersLost(Exception):
    """No node's exporter answers."""


async def all_metrics() -> str:
    """In Prometheus' text format. A node that does not answer is left out, and logged.

    Raises:
        ExportersLost: no node answers.
    """
    urls = await asyncio.to_thread(exporter_urls)
    # Exporters speak plain HTTP: to load certificates for each client would take the event loop tens of milliseconds.
    async with httpx.AsyncClient(timeout=TIMEOUT_S, verify=False) as client:
        answers = await asyncio.gather(*(exposition_of(client, url) for url in urls))
    expositions = [answer for answer in answers if answer is not None]
    if not expositions:
        raise ExportersLost(f"none of {len(urls)} nodes answers with its metrics")
    return await asyncio.to_thread(merged, expositions, PREFIXES)


def exporter_urls() -> list[str]:
    """Of all nodes that are alive."""
    nodes: Any = ray.nodes
    addresses = [(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in nodes() if node["Alive"]]
    return [
        f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"
        for host, port in addresses
    ]


async def exposition_of(client: httpx.AsyncClient, url: str) -> str | None:
    try:
        return (await client.get(url)).raise_for_status().text
    except httpx.HTTPError as error:
        logger.warning("The metrics of a node are missing: %s does not answer: %r", url, error)
        return None
