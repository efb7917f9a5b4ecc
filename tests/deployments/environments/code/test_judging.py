"""Comparing what a program gave with what was expected, and reading its reply."""

from typing import Any

import pytest

from deployments.environments.code.judging import equal, reported
from deployments.environments.code.replies import last_code_block


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
        ("x = 1", None),
        ("", None),
    ],
)
def test_the_last_block_of_python_counts(reply: str, code: str | None) -> None:
    assert last_code_block(reply) == code


def test_only_lines_with_the_token_are_results_and_the_first_one_counts() -> None:
    stdout = 't 0 {"value": 1}\nother 1 {"value": 2}\nt 1 {"value": 3}\nt 1 {"value": 4}\nt x {}\nt 2 [\nt 3 5\n'

    assert reported(stdout, "t") == {0: {"value": 1}, 1: {"value": 3}}
