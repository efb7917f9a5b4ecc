"""Compares an answer with a ground truth by math-verify. This runs in worker processes, which import little else."""

import logging
import resource
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from deployments.environments.math.answers import last_box
from deployments.environments.math.latex import as_text, normalized

COMPARISON_MEMORY_BYTES = 2**30
"""What a comparison may allocate beyond the loaded libraries. Ordinary ones need a few MiB."""
DELIMITERS = ("$", "\\(", "\\[", "\\boxed")


class Comparison(NamedTuple):
    """The result of a worker."""

    correct: bool | None
    """None if the ground truth is no mathematical expression."""
    extracted: str | None
    """The answer that math-verify read out of the response."""


def ground_truth_text(ground_truth: str | int | float) -> str:
    """The ground truth as LaTeX. Floats have no exponent, which LaTeX would read as a product with e."""
    if isinstance(ground_truth, float):
        finite = Decimal(repr(ground_truth))
        return f"{finite:f}" if finite.is_finite() else ""
    return str(ground_truth).strip()


def prepare_worker() -> None:
    """Bounds this worker's memory, and loads what the first comparison needs."""
    # It warns in each process that its own time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    compare("42", "\\boxed{42}")
    mapped_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = mapped_pages * resource.getpagesize() + COMPARISON_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def compare(ground_truth: str, response: str) -> Comparison:
    """Compares the answer in `response` with `ground_truth`, without a time limit."""
    from deployments.environments.math.exact import is_equal

    expected = expected_of(ground_truth)
    if not expected:
        return Comparison(correct=None, extracted=None)
    given = read(response)
    extracted = next((item for item in reversed(given) if isinstance(item, str)), None)
    correct = is_same_text(normalized(ground_truth), extracted) or (bool(given) and is_equal(expected, given))
    return Comparison(correct, extracted)


def is_same_text(ground_truth: str, answer: str | None) -> bool:
    """Whether the answer is the ground truth to the letter, as is `even` for `\\text{even}`; an empty one is not."""
    return answer is not None and as_text(answer) == as_text(ground_truth) != ""


@lru_cache(maxsize=256)
def expected_of(ground_truth: str) -> list[Any]:
    """What math-verify reads out of a ground truth, which the rollouts of a group share; empty if it cannot be read."""
    expected = next(filter(has_expression, map(read, readings(ground_truth))), [])
    # A text between delimiters that is no expression is compared as a text.
    return expected or (read(ground_truth) if has_delimiters(ground_truth) else [])


def read(text: str) -> list[Any]:
    """Expressions, and the text in which they were found. A number in a box that cannot be read is no answer."""
    from math_verify import LatexExtractionConfig, parse  # type: ignore[import-untyped]

    text = normalized(text)
    limited = {"extraction_config": [LatexExtractionConfig()]} if last_box(text) is not None else {}
    return [with_imaginary_unit(item) for item in parse(text, **limited, parsing_timeout=None)]


def with_imaginary_unit(item: Any) -> Any:
    """The expression with i as the imaginary unit: math-verify takes it for one of two variables, by what is beside."""
    from sympy import I  # type: ignore[import-untyped]

    named = [symbol for symbol in getattr(item, "free_symbols", ()) if symbol.name == "i"]
    try:
        return item.xreplace(dict.fromkeys(named, I)) if named else item
    except (TypeError, ValueError):
        # Such as of an inequality, which no imaginary number satisfies: it is another i.
        return item


def readings(ground_truth: str) -> tuple[str, str]:
    """The texts as which a ground truth is tried to be read: one that has delimiters of LaTeX first as it is."""
    boxed = f"\\boxed{{{ground_truth}}}"
    return (ground_truth, boxed) if has_delimiters(ground_truth) else (boxed, ground_truth)


def has_delimiters(text: str) -> bool:
    # A price has a dollar sign that is no delimiter.
    formula = text.replace(r"\$", "")
    return any(delimiter in formula for delimiter in DELIMITERS)


def has_expression(parsed: list[Any]) -> bool:
    """Whether math-verify found more than texts."""
    return any(not isinstance(item, str) for item in parsed)
