"""The response of `POST /rollout` as the client returns it: the contract's, as a table and as files too.

Each method imports what it needs when it is called.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Self

from rollout_client.contract.rollouts import RolloutResponse as PlainResponse
from rollout_client.contract.rollouts import SampleResult

if TYPE_CHECKING:
    import pyarrow as pa


class DataOut:
    """Mixin of `PlayedRollouts` and `ArrowResponse`: their rollouts as a table and as files."""

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

    def save(self, path: str | Path) -> None:
        """Writes everything to `path`; `RolloutResponse.load` gives an equal response, with its tokens and numbers.

        `.parquet` has the rows of `to_arrow`; `.jsonl` has a line of JSON for each rollout, then `{"summary": ...}`.

        Raises:
            ValueError: `path` ends otherwise, or a value does not fit its column.
            ModuleNotFoundError: `.parquet` without the extra `arrow`.
        """
        from rollout_client.data_out.files import save_response

        save_response(self, Path(path))


class PlayedRollouts(PlainResponse, DataOut):
    """The answer of `POST /rollout`, whose rollouts can be saved and tabulated.

    Users import it as `rollout_client.RolloutResponse`.
    """

    def __repr_name__(self) -> str:
        return PlainResponse.__name__

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The response that `save` wrote to `path`.

        Raises:
            ValueError: the file is none of `save`; the message says what is wrong with it.
            ModuleNotFoundError: the file is `.parquet`, and the extra `arrow` is missing.
        """
        from rollout_client.data_out.files import load_response

        return load_response(cls, Path(path))


RolloutResponse = PlayedRollouts
"""Its name for users."""
