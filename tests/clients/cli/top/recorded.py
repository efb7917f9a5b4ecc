"""Two pages of `GET /metrics`, 15.3 s apart, of a service with the embedded model that played math and sliding_puzzle.

They are what it answered, whole; only the path of the model was made a relative one.
"""

import gzip
from pathlib import Path

FIRST, SECOND = (
    gzip.decompress((Path(__file__).parent / f"metrics-{number}.txt.gz").read_bytes()).decode() for number in (1, 2)
)
SECONDS_BETWEEN = 15.337
GENERATOR = "m4xp54jw"
"""The id of its only generator replica."""
