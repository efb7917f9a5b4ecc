"""Settings of the records of rollouts."""

from pydantic import Field

from deployments.rollout_records.comparison import MOST_COUNTED
from deployments.strict_settings import StrictSettings

MIB = 2**20


class RolloutRecordsSettings(StrictSettings):
    most_mean_ratio: float = Field(default=1.1, gt=1, lt=MOST_COUNTED)
    """Mean probability ratio above which a trainer's reports count as a mismatch, where no token counts as more than
    10. Rounding in bfloat16 makes one or two percent."""
    max_bytes: int = Field(default=512 * MIB, ge=1)
    """Bound of all records together, in memory: beyond it the caller who has the most loses the oldest. A token takes
    about 10 bytes. A restart of the store forgets all."""
