"""math-verify with numbers compared exactly, or relatively where one is a decimal. Imports sympy: for worker processes.

math-verify 0.9 takes numbers as equal whose difference is below 1e-15, or that agree in six decimals if one of them is
a decimal: 1/2**98 for 1/2**99, and 1e-7 for 0. Two functions of `math_verify.grader` decide this. They are replaced
there, as all others call them by their names: for the items of sets, the bounds of intervals, the entries of matrices.
"""

from typing import Any

from math_verify import grader, verify  # type: ignore[import-untyped]
from sympy import Abs, Expr, Float, Integral, Limit, Max, Min, Product, Sum, simplify  # type: ignore[import-untyped]

DIGITS = 100
AGREEMENT = Float(10) ** -90
"""Relative difference below which numbers are equal: sympy cannot prove all that are."""
DECIMALS, DECIMAL_AGREEMENT, ROUNDING = Float("1e-6"), Float("1e-5"), Float("1e-12")
"""A decimal agrees in six decimals, as at math-verify, and relatively if it is small or large."""
LABORIOUS = (Integral, Sum, Product, Limit)
_numerically, _symbolically = grader.sympy_numeric_eq, grader.sympy_symbolic_eq


def is_equal(expected: list[Any], given: list[Any]) -> bool:
    """Whether any of the readings are equal, without a limit of time."""
    grader.sympy_numeric_eq, grader.sympy_symbolic_eq = numerically_equal, symbolically_equal
    return bool(verify(expected, given, timeout_seconds=None))


def numerically_equal(gold: Any, pred: Any, float_rounding: int, numeric_precision: int) -> bool:
    if are_numbers(gold, pred):
        return numbers_equal(gold, pred)
    if isinstance(gold, Expr) and isinstance(pred, Expr) and not (gold.has(Float) or pred.has(Float)):
        # Simplifying their difference comes next, which is exact.
        return False
    return bool(_numerically(gold, pred, float_rounding, numeric_precision))


def symbolically_equal(gold: Any, pred: Any) -> bool:
    return not are_numbers(gold, pred) and bool(_symbolically(gold, pred))


def are_numbers(*parts: Any) -> bool:
    return all(isinstance(part, Expr) and not part.free_symbols and not part.has(*LABORIOUS) for part in parts)


def numbers_equal(gold: Expr, pred: Expr) -> bool:
    """Where one is a percentage, 50% is both a half and the answer 50 to a question for a percentage."""
    percents = [grader.get_pct_val(number) for number in (gold, pred)]
    if percents.count(None) == 1 and values_equal(percents[0] or gold, percents[1] or pred):
        return True
    return values_equal(gold, pred)


def values_equal(gold: Expr, pred: Expr) -> bool:
    left, right = grader.safe_sympy_doit(gold), grader.safe_sympy_doit(pred)
    if left == right:
        return True
    if left.is_Rational and right.is_Rational:
        return False
    is_decimal = left.has(Float) or right.has(Float)
    left, right = left.evalf(DIGITS), right.evalf(DIGITS)
    difference, size = Abs(left - right).evalf(), Max(Abs(left).evalf(), Abs(right).evalf())
    if not (difference.is_finite and size.is_finite):
        return False
    if is_decimal:
        return bool(difference <= Min(DECIMALS, DECIMAL_AGREEMENT * size) + ROUNDING * size)
    # Nothing agrees with 0 relatively.
    return bool(difference <= AGREEMENT * size) or (size < AGREEMENT and simplify(gold - pred) == 0)
