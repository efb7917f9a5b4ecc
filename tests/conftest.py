"""For all tests. Those below `live/` need Ray and the engine; all others start neither."""

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.live.played_with_weights")

# How long an example takes says more of the machine than of the code.
settings.register_profile("without deadlines", deadline=None)
settings.register_profile("fast", deadline=None, max_examples=25)
settings.load_profile("without deadlines")
