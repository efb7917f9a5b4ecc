"""A run that is killed anywhere, with streams that break, has each rollout once in the end."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client import SampleResult
from rollout_client.cli.run.plan import INPUT_ROW, RunPlan
from rollout_client.cli.run.results_file import recovered
from rollout_client.data_out.files import json_line
from rollout_client.json_lines import BYTE_ORDER_MARK
from tests.clients.scripted_service import result

RESULTS = [SampleResult(**result(generation_index=generation, content="a\nb\u2028")) for generation in range(3)]


def play(plan: RunPlan, generations: int, chunk_size: int, random: Random, may_break: bool) -> bytes:
    """Plays the plan to its end, rollouts in any order; returns what is appended."""
    appended = b""
    chunks: list[tuple[list[int], list[tuple[int, int]]]] = []
    while (rows := plan.next_chunk(chunk_size) if not chunks or random.random() < 0.4 else []) or chunks:
        if rows:
            chunks.append((rows, [(row, generation) for row in rows for generation in range(generations)]))
        rows, waiting = random.choice(chunks)
        if may_break and random.random() < 0.1:
            waiting.clear()
        if waiting:
            row, generation = waiting.pop(random.randrange(len(waiting)))
            if group := plan.add(row, RESULTS[generation]):
                appended += b"".join(json_line(sample, **{INPUT_ROW: row}) for sample in group)
        if not waiting:
            chunks.remove((rows, waiting))
            plan.give_back(rows)
    return appended


@given(
    st.integers(0, 6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(st.floats(0, 1), max_size=5),
    st.randoms(use_true_random=False),
)
def test_each_rollout_is_there_once_wherever_the_run_is_killed(
    row_count: int, generations: int, chunk_size: int, kills: list[float], random: Random
) -> None:
    content = b""
    for kill in [*kills, None]:
        found = recovered(content.splitlines(keepends=True), generations)
        content = content[: found.kept_bytes]
        plan = RunPlan(row_count, generations, found.rows)
        appended = play(plan, generations, chunk_size, random, may_break=kill is not None)
        content += appended if kill is None else appended[: int(kill * len(appended))]
    rollouts = [SampleResult.model_validate_json(line) for line in content.split(b"\n")[:-1]]
    played = [((rollout.model_extra or {})[INPUT_ROW], rollout.generation_index) for rollout in rollouts]
    expected = [(row, generation) for row in range(row_count) for generation in range(generations)]
    assert sorted(played) == expected
    assert recovered(content.splitlines(keepends=True), generations).totals.rollouts == len(expected)


def test_a_rollout_that_ends_twice_or_was_not_asked_for_is_refused() -> None:
    plan = RunPlan(2, 2)
    assert plan.next_chunk(1) == [0]
    assert plan.add(0, RESULTS[1]) is None
    with pytest.raises(ValueError, match=r"Generation 1 of row 0 was not asked for\."):
        plan.add(0, RESULTS[1])
    with pytest.raises(ValueError, match=r"Generation 0 of row 1 was not asked for\."):
        plan.add(1, RESULTS[0])


def row_line(row: object, generation: int = 0) -> bytes:
    return json_line(RESULTS[generation], **{INPUT_ROW: row})


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([row_line(0), b"torn\n", row_line(1)], "line 2 is not a rollout: Invalid JSON: .*"),
        ([row_line(0), row_line(0)], "line 2 has generation 0 of row 0, which does not come there"),
        ([row_line(0, 1)], "line 1 has generation 1 of row 0, which does not come there"),
        ([json_line(RESULTS[0])], "line 1 has no input_row"),
    ],
)
def test_a_file_that_no_run_wrote_is_refused_with_its_line(lines: list[bytes], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        recovered(lines, 1)


def test_results_with_a_byte_order_mark_are_continued() -> None:
    lines = [BYTE_ORDER_MARK + row_line(0), row_line(1)]
    found = recovered(lines, 1)
    assert (found.kept_bytes, found.rows) == (sum(map(len, lines)), {0, 1})


@pytest.mark.parametrize("tail", [b"", b"\0" * 64, b'{"idx": 1', b"no JSON\n", b"1\n", row_line(4)[:-1]])
def test_what_a_kill_left_behind_is_not_kept(tail: bytes) -> None:
    whole = row_line(3)
    found = recovered([whole, *([tail] if tail else [])], 1)
    assert (found.kept_bytes, found.rows) == (len(whole), {3})
