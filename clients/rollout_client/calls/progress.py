"""Progress bars for terminals: rollouts with tokens/s and mean reward, bytes of an upload. Need the `cli` extra."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollout_client.contract.rollouts import SampleResult
from rollout_client.errors import needed_for
from rollout_client.results import final_reward


@contextmanager
def rollout_bar(total: int, done: int = 0) -> Iterator[Callable[[SampleResult], None]]:
    """`counting_bar`, whose function takes each finished sample."""
    with counting_bar(total, done) as count:
        yield lambda sample: count(sample.metrics.assistant_tokens, sample.status == "error", final_reward(sample))


@contextmanager
def counting_bar(total: int, done: int = 0) -> Iterator[Callable[[int, bool, float | None], None]]:
    """Shows a bar on stderr for the length of the block; yields the function to call for each finished rollout with its
    generated tokens, whether it failed, and its final reward.

    It counts rollouts and shows generated tokens per second, the mean of the final rewards, and how many failed.
    `done` of the `total` rollouts had ended before: they are on the bar and in none of the figures.

    Raises:
        ModuleNotFoundError: rich is not installed; the message says what to install.
    """
    with needed_for("A progress bar", "cli"):
        from rich import progress
        from rich.console import Console
        from rich.table import Column
    columns = (
        progress.BarColumn(bar_width=10),
        progress.MofNCompleteColumn(table_column=Column(no_wrap=True)),
        progress.TextColumn("rollouts, {task.fields[figures]}", table_column=Column(no_wrap=True)),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, completed=done, figures="0 failed")
        shown = bar.tasks[task]
        tokens, failed, reward_sum, rewarded = 0, 0, 0.0, 0

        def add(generated_tokens: int, has_failed: bool, reward: float | None) -> None:
            nonlocal tokens, failed, reward_sum, rewarded
            tokens += generated_tokens
            failed += has_failed
            if reward is not None:
                reward_sum, rewarded = reward_sum + reward, rewarded + 1
            rate = f"{tokens / shown.elapsed:,.0f} tokens/s, " if shown.elapsed else ""
            mean = f"mean reward {reward_sum / rewarded:.3f}, " if rewarded else ""
            bar.update(task, advance=1, figures=f"{rate}{mean}{failed} failed")

        yield add


@contextmanager
def upload_bar(version: int, is_shown: bool) -> Iterator[Callable[[int, int | None], None]]:
    """Shows a bar on stderr, if `is_shown`, for the length of the block; yields the function to call with sent and
    total bytes.

    Raises:
        ModuleNotFoundError: rich is not installed; the message says what to install.
    """
    if not is_shown:
        yield lambda _arrived_bytes, _total_bytes: None
        return
    with needed_for("A progress bar", "cli"):
        from rich import progress
        from rich.console import Console
    columns = (
        progress.BarColumn(bar_width=24),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TextColumn("{task.description}"),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"version {version}: uploading", total=None)

        def show(arrived_bytes: int, total_bytes: int | None) -> None:
            doing = "loaded" if arrived_bytes == total_bytes else "uploading"
            bar.update(task, completed=arrived_bytes, total=total_bytes, description=f"version {version}: {doing}")

        yield show
