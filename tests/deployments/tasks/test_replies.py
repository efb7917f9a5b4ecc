"""Reading the code of a reply, and comparing JSON with what was expected."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.tasks.replies import last_code_block
from deployments.tasks.support import json_equal


@pytest.mark.parametrize(
    ("value", "expected", "is_equal"),
    [
        (3, 3.0, True),
        (1, True, False),
        (0, False, False),
        (True, True, True),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        (float("nan"), 0.3, False),
        (float("inf"), float("inf"), True),
        ("3", 3.0, False),
        ([1, [2.0]], [1, [2]], True),
        ([1], [1, 2], False),
        ({"a": [1]}, {"a": [1.0]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (None, 0, False),
    ],
)
def test_values_are_equal_as_json_is(value: Any, expected: Any, is_equal: bool) -> None:
    assert json_equal(value, expected) is is_equal


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("a\n```py\nx\n```\nb\n```Python\ny\n```\nc", "y\n"),
        ("```python\nx\n```\n```bash\nls\n```", "x\n"),
        ("```python\nx\n```\nIt prints:\n```\n42\n```", "x\n"),
        ("```\nx\n```\n```python\ny\n```\n```\nz\n```\n```text\nz\n```", "y\n"),
        ("```python title=a.py\nx\n```", "x\n"),
        ("```python\nx\n```\n```python\ny", "y\n"),
        ("```\nx\n```\n```", "x\n"),
        ("```python\nx\n```\n```python\n\n", "x\n"),
        ("```python\r\nx\r\n```\r\n", "x\r\n"),
        ("~~~ py `x`\nx\n~~~~", "x\n"),
        ("```print(x)``` is\nfollowed by ```\n```python\ny\n```", "y\n"),
        ("Use ```python\nx", None),
        ("1. This:\n\n    ```python\n    if x:\n        y\n\n    ```\n2. That", "if x:\n    y\n\n"),
        ("10) ~~~py\n    x\n    ~~~", "x\n"),
        ("\t```python\n\tif x:\n\t\ty\n\t```", "if x:\n    y\n"),
        ("```python\n'''\n    ```\n\t```\n'''\n   ```\nz", "'''\n    ```\n\t```\n'''\n"),
        *(
            (f"```{language}\nx\n```", "x\n")
            for language in ("py3", "python3", "Python3.12", "ipython", "{.python .x}")
        ),
        *((f"```{language}\nx\n```", None) for language in ("python-repl", "pycon", "py2", "c++", "pyx", "cpython")),
        ("x = 1", None),
    ],
)
def test_the_last_python_block_counts_or_else_the_last_without_a_mark(reply: str, code: str | None) -> None:
    assert last_code_block(reply) == code


FENCED = re.compile(
    r"^(?:(?P<ticks>```+)(?P<word>[^`\n]*)|(?P<tildes>~~~+)(?P<other>[^\n]*))\n"
    r"(?P<code>.*?)(?:^(?:(?P=ticks)`*|(?P=tildes)~*) *$|\Z)",
    re.DOTALL | re.MULTILINE,
)
# A block of CommonMark, in a form that takes quadratic time.
LINES = st.sampled_from(["```", "````", "~~~", "~~~~ ", "```python", "~~~ py", "````sh", "```x`", "x```", "x", "y "])


@given(st.lists(LINES, max_size=12))
def test_fences_are_those_of_commonmark(lines: list[str]) -> None:
    blocks = list(FENCED.finditer("".join(f"{line}\n" for line in [*lines, "end"])))
    words = [(match["word"] or match["other"] or "").strip() for match in blocks]
    marked = [match["code"] for match, word in zip(blocks, words, strict=True) if word in ("python", "py")]
    others = [match["code"] for match, word in zip(blocks, words, strict=True) if word == ""]
    assert last_code_block("\n".join([*lines, "end"])) == ((marked or others)[-1] if marked or others else None)


@given(
    st.lists(st.text(alphabet="x` ~'", max_size=6), max_size=5),
    st.sampled_from("`~"),
    st.integers(7, 9),
    st.sampled_from(["", "   ", "1. ", "    ", "  -  "]),
    st.booleans(),
)
def test_code_comes_out_of_every_fence_as_it_was_put_in(
    lines: list[str], character: str, length: int, before: str, is_closed: bool
) -> None:
    mark, indent = character * length, " " * len(before)
    code = "".join(f"{line}\n" for line in ["x", *lines])
    inside = "".join(f"{indent}{line}\n" for line in code.splitlines())
    assert last_code_block(f"{before}{mark}py\n{inside}" + f"{indent}{mark}\n```\n" * is_closed) == code
