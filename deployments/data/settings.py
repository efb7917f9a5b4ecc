"""The data set of one task: `data` of its entry in the config."""

import re
from typing import Annotated, Self

from pydantic import Field, model_validator

from deployments.strict_settings import StrictSettings
from rollout_client.contract.rollouts import SampleInput, SampleResult

PROMPT_PLACE = "{prompt}"
FIRST_SPLIT = "train"
"""The name of the only split, where the files have no names of splits."""
REFUSED_FIELDS = (SampleResult.model_fields.keys() - SampleInput.model_fields.keys()) | {"task_name"}
"""The results have them: a further field of a sample may not be named so. The task is that of the data."""
Names = str | list[str]


class ColumnSettings(StrictSettings):
    """Where the value of one field of a sample comes from."""

    column: str
    """Name of a column, or a path into one: `reward_model.ground_truth`."""
    pattern: re.Pattern[str] | None = None
    """A regular expression that is searched in the column's text. The value is its first group, or all that it matches.
    A row in which it matches nothing is refused."""
    parse_json: bool = False
    """Whether the column's text is JSON, whose content is the value."""


class HubSettings(StrictSettings):
    """A data set of the Hugging Face Hub, or a folder that is laid out like one."""

    name: str
    """Such as `openai/gsm8k`."""
    config: str | None = None
    """One of the data set's own configurations, such as `main`."""
    revision: str | None = None
    """A branch, tag or commit; by default the newest."""


class DataSettings(StrictSettings):
    """Where the samples of a task come from, in place of the example samples that its environment makes."""

    files: Names | dict[str, Names] | None = None
    """Paths or patterns (`data/*.parquet`) of files that end in `.jsonl` or `.parquet`: of one split, which is then
    called `train`, or by name of split."""
    hub: HubSettings | None = None
    """In place of files: all splits of a data set."""
    columns: dict[str, str | ColumnSettings] = Field(default_factory=dict)
    """The column for each field of a sample: `messages`, `id`, `extra_env_info.ground_truth`, ... A text as `messages`
    becomes one message of the user. By default rows have columns that are named like the fields of a sample; `prompt`
    is another name of `messages`."""
    system_prompt: str | None = None
    """The first message of each prompt, before those of the row."""
    prompt_template: str | None = None
    """A text around a prompt that is one text: `{prompt}` stands for it."""
    held_out: dict[str, Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)]] = Field(default_factory=dict)
    """Further splits, by name: a number of rows (200) or a share (0.05) of the first split, which loses them. Equal
    data have equal splits."""
    shuffle_seed: int | None = Field(default=None, ge=0)
    """Shuffles every epoch, each in another way, where a request has no `seed`. Without either, samples come
    in the order of the rows."""

    @model_validator(mode="after")
    def has_one_source(self) -> Self:
        if (self.files is None) == (self.hub is None):
            raise ValueError("give either files or hub")
        return self

    @model_validator(mode="after")
    def maps_to_fields_of_a_sample(self) -> Self:
        for target in self.columns:
            first, _, rest = target.partition(".")
            if first in REFUSED_FIELDS or (rest and first != "extra_env_info"):
                raise ValueError(f"columns.{target}: a sample cannot have this field; give it another name")
            if rest and first in self.columns:
                raise ValueError(f"columns.{first} is the whole of it: leave out the columns of its fields")
        return self

    @model_validator(mode="after")
    def has_a_place_for_the_prompt(self) -> Self:
        if self.prompt_template is not None and PROMPT_PLACE not in self.prompt_template:
            raise ValueError(f"prompt_template must contain {PROMPT_PLACE}")
        return self

    @property
    def files_by_split(self) -> dict[str, list[str]]:
        """The names under `files`, by split."""
        by_split = self.files if isinstance(self.files, dict) else {FIRST_SPLIT: self.files or []}
        return {split: [names] if isinstance(names, str) else names for split, names in by_split.items()}
