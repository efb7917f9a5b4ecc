"""The metrics of all replicas, from Ray's exporter on each node, whichever ingress replica asks; merged into one text.

Source of the format: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format. All lines of one
metric must stand together.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import httpx
import ray

PARTS_OF_HISTOGRAM = ("_bucket", "_sum", "_count")


def merged(expositions: Iterable[str], prefixes: Sequence[str]) -> str:
    """The metrics whose names begin with one of `prefixes`, those of one name together, in the order of names."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for exposition in expositions:
        for name, line in _lines_by_metric(exposition, tuple(prefixes)):
            if line.startswith("#"):
                known = heads.setdefault(name, [])
                if line.split(maxsplit=3)[:3] not in [each.split(maxsplit=3)[:3] for each in known]:
                    known.append(line)
            else:
                samples.setdefault(name, []).append(line)
    lines = [line for name in sorted(samples) for line in (*heads.get(name, ()), *samples[name])]
    return "".join(f"{line}\n" for line in lines)


def _lines_by_metric(exposition: str, prefixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The lines of metrics with these prefixes, each with the name of its metric.

    That is the name in the heading before, if the line is a part of its histogram.
    """
    heading, parts = "", frozenset[str]()
    for line in exposition.split("\n"):
        if line.startswith("#"):
            words = line.split(maxsplit=3)
            if len(words) > 2 and words[1] in ("HELP", "TYPE"):
                heading = words[2]
                parts = frozenset(heading + part for part in PARTS_OF_HISTOGRAM)
                if heading.startswith(prefixes):
                    yield heading, line
        elif line.startswith(prefixes):
            name = line.split("{", 1)[0].split(" ", 1)[0]
            yield heading if name in parts else name, line


PREFIXES = ("ray_rollout_", "ray_vllm_", "ray_serve_")
"""Prefixes of the metrics of rollouts, engines and Ray Serve. Ray's exporters have many more, of its own."""
TIMEOUT_S = 5.0
logger = logging.getLogger("rollout_service.metrics")


class ExportersLost(Exception):
    """No node's exporter answers."""


async def all_metrics() -> str:
    """In Prometheus' text format. A node that does not answer is left out, and logged.

    Raises:
        ExportersLost: no node answers.
    """
    urls = await asyncio.to_thread(_exporter_urls)
    # Exporters speak plain HTTP: to load certificates for each client would take the event loop tens of milliseconds.
    async with httpx.AsyncClient(timeout=TIMEOUT_S, verify=False) as client:
        answers = await asyncio.gather(*(_exposition_of(client, url) for url in urls))
    expositions = [answer for answer in answers if answer is not None]
    if not expositions:
        raise ExportersLost(f"none of {len(urls)} nodes answers with its metrics")
    return await asyncio.to_thread(merged, expositions, PREFIXES)


def _exporter_urls() -> list[str]:
    """URLs of the exporters of all live nodes."""
    nodes: Any = ray.nodes
    addresses = [(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in nodes() if node["Alive"]]
    return [
        f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"
        for host, port in addresses
    ]


async def _exposition_of(client: httpx.AsyncClient, url: str) -> str | None:
    try:
        return (await client.get(url)).raise_for_status().text
    except httpx.HTTPError as error:
        logger.warning("The metrics of a node are missing: %s does not answer: %r", url, error)
        return None
