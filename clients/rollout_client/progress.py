"""A progress bar that counts samples and tokens, for terminals; needs the `cli` extra."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollout_client.contract import SampleResult


@contextmanager
def rollout_bar(total: int) -> Iterator[Callable[[SampleResult], None]]:
    """Shows a bar on stderr for the length of the block; yields what to call with each finished sample.

    Raises:
        ModuleNotFoundError: rich is not installed; the message says what to install.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('A progress bar needs rich: pip install "rollout-client[cli]"') from error
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
