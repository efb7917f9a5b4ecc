"""Lines of a stream, without a connection."""

import json

from hypothesis import given
from hypothesis import strategies as st

from rollout_client.ndjson import NdjsonReader
from tests.clients.scripted_service import lines_of, sample


@given(st.lists(st.integers(min_value=1, max_value=5000), max_size=20))
def test_lines_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    lines = [json.dumps(line) for line in lines_of({"samples": [sample(), sample(), sample()]})]
    sent = "".join(f"{line}\n" for line in lines).encode()
    ends = [*sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    reader = NdjsonReader(3)
    read = [
        position for start, end in zip([0, *ends], ends, strict=False) for position, _ in reader.feed(sent[start:end])
    ]
    reader.end()
    assert read == [2, 1, 0]
    assert reader.summary is not None
