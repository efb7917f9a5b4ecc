"""Comparing what a program gave with what was expected, and reading its reply."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.environments.code_judging import equal, reported
from deployments.environments.replies import last_code_block


@pytest.mark.parametrize(
    ("value", "expected", "is_equal"),
    [
        (3, 3, True),
        (3, 3.0, True),
        (1, True, False),
        (0, False, False),
        (True, True, True),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        (float("nan"), 0.3, False),
        (float("inf"), float("inf"), True),
        ("3", 3, False),
        ("3", 3.0, False),
        ([1, [2.0]], [1, [2]], True),
        ([1], [1, 2], False),
        ({"a": [1]}, {"a": [1.0]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (None, None, True),
        (None, 0, False),
    ],
)
def test_values_are_equal_as_json_is(value: Any, expected: Any, is_equal: bool) -> None:
    assert equal(value, expected) is is_equal


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("```python\nx\n```", "x\n"),
        ("```\nx\n```", "x\n"),
        ("a\n```py\nx\n```\nb\n```Python\ny\n```\nc", "y\n"),
        ("```python\nx\n```\n```bash\nls\n```", "x\n"),
        ("```python title=a.py\nx\n```", "x\n"),
        ("```python\n```", ""),
        ("```python\nx", None),
        ("```python\nx\n```\n```python\ny", "x\n"),
        ("```python\n```python\nx\n```", "```python\nx\n"),
        ("  ```python\n  x\n  ``` ", "  x\n"),
        ("```python\r\nx\r\n```\r\n", "x\r\n"),
        ("````python\nx\n````\n```", "x\n````\n"),
        ("x = 1", None),
        ("", None),
    ],
)
def test_the_last_block_of_python_counts(reply: str, code: str | None) -> None:
    assert last_code_block(reply) == code


FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
"""What a block is, in a form that takes quadratic time."""
FENCES = st.sampled_from(["```", "```python", "``` sh", " ``` ", "\t```py x", "x```", "````", "x", "", "y "])


@given(st.lists(FENCES, max_size=12))
def test_a_block_begins_at_a_fence_and_ends_at_the_next_one_without_a_word(lines: list[str]) -> None:
    reply = "\n".join(lines)
    blocks = [match[2] for match in FENCE.finditer(reply) if match[1] in ("", "python", "py")]
    assert last_code_block(reply) == (blocks[-1] if blocks else None)


def test_only_lines_with_the_token_are_results_and_the_first_one_counts() -> None:
    stdout = 't 0 {"value": 1}\nother 1 {"value": 2}\nt 1 {"value": 3}\nt 1 {"value": 4}\nt x {}\nt 2 [\nt 3 5\n'
    assert reported(stdout, "t") == {0: {"value": 1}, 1: {"value": 3}}
