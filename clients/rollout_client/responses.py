"""The response of `POST /rollout` as the client returns it: the contract's, with methods that read it elsewhere.

Each method imports what it needs when it is called.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Self

from rollout_client.contract.rollouts import RolloutResponse, SampleResult

if TYPE_CHECKING:
    import datasets
    import pandas as pd
    import pyarrow as pa


class DataOut:
    """Mixin of `PlayedRollouts` and `ArrowResponse`: their rollouts as tables, data sets and files."""

    if TYPE_CHECKING:

        @property
        def samples(self) -> list[SampleResult]: ...

    def to_arrow(self) -> "pa.Table":
        """One row per rollout, with the columns `rollout_client.data_out.table.COLUMNS`. Nothing is lost.

        `metrics` has two fields more: `finish_reason` of the last response, and `clipped`: its length has cut it.

        Raises:
            ModuleNotFoundError: without the extra `arrow`.
            ValueError: a value does not fit its column, such as a token id of 2^31.
        """
        from rollout_client.data_out.table import arrow_table

        return arrow_table(self)

    def to_pandas(self) -> "pd.DataFrame":
        """One row per rollout: the fields of `SampleResult` and the sample's own further fields.

        Rewards, metrics and the error have a column for each of their fields: `rewards.NAME`,
        `metrics.turn_count`, `error.kind`. `metrics.finish_reason` is that of the last response, and `metrics.clipped`
        says that its length has cut it (`length`). `message_log` and `extra_env_info` hold Python objects.

        Raises:
            ModuleNotFoundError: without the extra `pandas`.
        """
        from rollout_client.data_out.frame import data_frame

        return data_frame(self)

    def to_dataset(self) -> "datasets.Dataset":
        """The rows of `to_arrow` as a Hugging Face data set; `rewards` is a list of `{key, value}`.

        Raises:
            ModuleNotFoundError: without the extra `datasets`.
            ValueError: a value does not fit its column.
        """
        from rollout_client.data_out.table import hugging_face_dataset

        return hugging_face_dataset(self)

    def to_parquet(self, path: str | Path) -> None:
        """Writes `to_arrow` to `path`; `RolloutResponse.load` reads it.

        Raises:
            ModuleNotFoundError: without the extra `arrow`.
            ValueError: a value does not fit its column.
        """
        from rollout_client.data_out.table import write_parquet

        write_parquet(self, Path(path))

    def save(self, path: str | Path) -> None:
        """Writes everything to `path`; `RolloutResponse.load` gives an equal response, with its tokens and numbers.

        `.parquet` is `to_parquet`. `.jsonl` has one JSON object a line, a rollout each, then `{"summary": ...}`.

        Raises:
            ValueError: `path` ends otherwise, or a value does not fit its column.
            ModuleNotFoundError: `.parquet` without the extra `arrow`.
        """
        from rollout_client.data_out.files import save_response

        save_response(self, Path(path))

    def _repr_html_(self) -> str:
        """For notebooks: how the request ended, and its first rollouts. Text of models is escaped."""
        from rollout_client.data_out.notebook import html_of

        return html_of(self)


class PlayedRollouts(RolloutResponse, DataOut):
    """The answer of `POST /rollout`, whose rollouts can be saved, tabulated and shown.

    `rollout_client` exports it as `RolloutResponse`.
    """

    def __repr_name__(self) -> str:
        return RolloutResponse.__name__

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The response that `save` wrote to `path`.

        Raises:
            ValueError: the file is none of `save`; the message says what is wrong with it.
            ModuleNotFoundError: the file is `.parquet`, and the extra `arrow` is missing.
        """
        from rollout_client.data_out.files import load_response

        return load_response(cls, Path(path))
