"""Progress bars for terminals: rollouts and their tokens, bytes of an upload. Need the `cli` extra."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollout_client.contract import SampleResult
from rollout_client.optional_dependencies import needed_for


@contextmanager
def rollout_bar(total: int) -> Iterator[Callable[[SampleResult], None]]:
    """Shows a bar on stderr for the length of the block; yields the function to call with each finished sample.

    Raises:
        ModuleNotFoundError: rich is not installed; the message says what to install.
    """
    with needed_for("A progress bar", "cli"):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("rollouts, {task.fields[tokens]:,} tokens generated, {task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, tokens=0, failed=0)
        fields = bar.tasks[task].fields

        def add(sample: SampleResult) -> None:
            tokens = fields["tokens"] + sample.metrics.assistant_tokens
            bar.update(task, advance=1, tokens=tokens, failed=fields["failed"] + (sample.status == "error"))

        yield add


@contextmanager
def upload_bar(version: int) -> Iterator[Callable[[int, int | None], None]]:
    """Shows a bar on stderr for the length of the block; yields the function to call with sent and total bytes.

    Raises:
        ModuleNotFoundError: rich is not installed; the message says what to install.
    """
    with needed_for("A progress bar", "cli"):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TransferSpeedColumn,
        )
    columns = (
        BarColumn(bar_width=24),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"version {version}: uploading", total=None)

        def show(arrived_bytes: int, total_bytes: int | None) -> None:
            doing = "loaded" if arrived_bytes == total_bytes else "uploading"
            bar.update(task, completed=arrived_bytes, total=total_bytes, description=f"version {version}: {doing}")

        yield show
