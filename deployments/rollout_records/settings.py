"""Settings of the records of rollouts: how many are kept, and for how long."""

from pydantic import Field

from deployments.rollout_records.ratios import MOST_COUNTED
from deployments.strict_settings import StrictSettings

MIB = 2**20


class RolloutRecordsSettings(StrictSettings):
    keep_s: float = Field(default=3600, gt=0)
    """A record is forgotten so many seconds after the end of its rollout."""
    most_mean_ratio: float = Field(default=1.1, gt=1, lt=MOST_COUNTED)
    """A trainer's probabilities part from those that were sampled with if they do so by more than this factor on
    average, where no token counts as more than 10. Rounding in bfloat16 makes one or two percent."""
    max_bytes: int = Field(default=512 * MIB, ge=1)
    """Bound of all records together, in memory: beyond it the caller who has the most loses the oldest. A token takes
    about 10 bytes. A restart of the store forgets all."""
