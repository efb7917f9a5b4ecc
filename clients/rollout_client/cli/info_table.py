"""The table of what a service is for a terminal, as a rich renderable."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from rollout_client.cli.transcript import plain
from rollout_client.contract.info import ServiceInfo
from rollout_client.version import CONTRACT_VERSION, __version__

LONGEST_SHOWN_DIGEST = 12


def info_table(info: ServiceInfo) -> Table:
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows_of(info):
        table.add_row(plain(name), plain("" if value is None else str(value)))
    return table


def rows_of(info: ServiceInfo) -> Iterator[tuple[str, Any]]:
    yield "model", info.model.name
    yield "revision", info.model.revision
    yield "vocabulary of the model", info.model.vocab_size
    yield "vocabulary of the tokenizer", info.tokenizer.vocabulary_size
    yield "tokenizer", info.tokenizer.vocabulary_sha256[:LONGEST_SHOWN_DIGEST]
    yield "chat template", (info.tokenizer.chat_template_sha256 or "none")[:LONGEST_SHOWN_DIGEST]
    yield "policy version", info.policy_version
    yield "tasks", ", ".join(info.tasks)
    yield from flat_limits(info.limits, "")
    yield "service", info.versions.service
    yield "engine", info.versions.engine
    yield "ray", info.versions.ray
    yield "transformers", info.versions.transformers
    yield "contract", f"{info.versions.contract} (this client {__version__}: {CONTRACT_VERSION})"


def flat_limits(limits: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Each limit by its path; those that are not set have no row."""
    for name, value in limits.items():
        if isinstance(value, dict):
            yield from flat_limits(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value
