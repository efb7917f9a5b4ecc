"""Lines of a file, and of a stream without a connection."""

import io
import json
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.calls.ndjson import NdjsonReader
from rollout_client.errors import StreamBroken
from rollout_client.json_lines import BYTE_ORDER_MARK, numbered_lines
from tests.clients.scripted_service import lines_of, sample

SPLITTING = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\ufeff"
"""Characters at which `str.splitlines` splits, and the byte-order mark."""


@given(
    rows=st.lists(st.none() | st.text(st.sampled_from(SPLITTING + "a\r\n"), max_size=5), max_size=5),
    mark=st.booleans(),
    end=st.sampled_from(["\n", "\r\n"]),
    ends_with_newline=st.booleans(),
)
def test_every_row_of_a_file_is_one_line_whatever_its_texts_and_editor(
    rows: list[str | None], mark: bool, end: str, ends_with_newline: bool
) -> None:
    """A `None` is an empty line."""
    lines = ["" if row is None else json.dumps(row, ensure_ascii=False) for row in rows]
    content = BYTE_ORDER_MARK * mark + (end.join(lines) + end * ends_with_newline).encode()
    read = [(number, json.loads(line)) for number, line in numbered_lines(io.BytesIO(content))]
    assert read == [(number, row) for number, row in enumerate(rows, start=1) if row is not None]


@given(st.lists(st.integers(min_value=1, max_value=5000), max_size=20))
def test_lines_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    lines = [json.dumps(line, ensure_ascii=False) for line in lines_of({"samples": [sample(), sample(), sample()]})]
    lines[0] = lines[0].replace("What", SPLITTING.replace("\x0b\x0c\x1c\x1d\x1e", ""))
    sent = "".join(f"{line}\n" for line in lines).encode()
    ends = [*sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    reader = NdjsonReader(3)
    read = [place for start, end in zip([0, *ends], ends, strict=False) for place, _ in reader.feed(sent[start:end])]
    reader.end()
    assert read == [2, 1, 0]
    assert reader.summary is not None


@pytest.mark.parametrize(("kept", "is_whole"), [(1, True), (2, False), (3, False)])
def test_a_stream_of_selected_groups_is_whole_with_as_many_as_were_kept(kept: int, is_whole: bool) -> None:
    """One of three groups of two rollouts has arrived."""
    *rollouts, summary = lines_of({"samples": [sample(), sample()]})
    end = {"summary": {**summary["summary"], "groups": {"drawn": 5, "kept": kept, "ahead": 0}}}
    reader = NdjsonReader(6, group_size=2)
    sent = "".join(f"{json.dumps(line)}\n" for line in (*rollouts, end)).encode()
    with nullcontext() if is_whole else pytest.raises(StreamBroken, match="after 2 of 6 rollouts"):
        assert [position for position, _ in reader.feed(sent)] == [1, 0]
