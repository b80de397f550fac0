"""Tests that kernels return Python's results to the bit, or report that they cannot."""

from __future__ import annotations

import importlib
import math
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest

from onceflow.core.compiled import arithmetic

pytest.importorskip("numba")
pytestmark = pytest.mark.servers

INT_MAX = 2**63 - 1
INTEGERS = [0, 1, -1, 2, -3, 7, 2**31, -(2**31), 2**53, 2**53 + 1, 2**62, INT_MAX, -INT_MAX - 1]
FLOATS = [
    0.0, -0.0, 1.0, -1.0, 0.1, -2.5, 3.0, 5e-324, 1e-300, 1e300, -1e308, 2.0**53, 2.0**63,
    -(2.0**63), math.inf, -math.inf, math.nan,
]  # fmt: skip


def _divide(a: Any, b: Any) -> Any:
    return a / b


def _floor_divide(a: Any, b: Any) -> Any:
    return a // b


TWO: list[tuple[Callable[..., Any], Callable[..., Any], list[Any]]] = [
    (arithmetic.add_integers, operator.add, INTEGERS),
    (arithmetic.subtract_integers, operator.sub, INTEGERS),
    (arithmetic.multiply_integers, operator.mul, INTEGERS),
    (arithmetic.floor_divide_integers, _floor_divide, INTEGERS),
    (arithmetic.modulo_integers, operator.mod, INTEGERS),
    (arithmetic.divide_integers, _divide, INTEGERS),
    (arithmetic.divide_floats, _divide, FLOATS),
    (arithmetic.floor_divide_floats, _floor_divide, FLOATS),
    (arithmetic.modulo_floats, operator.mod, FLOATS),
    (arithmetic.least, min, FLOATS),
    (arithmetic.greatest, max, FLOATS),
    (arithmetic.least, min, INTEGERS),
    (arithmetic.greatest, max, INTEGERS),
]
ONE: list[tuple[Callable[..., Any], Callable[..., Any], list[Any]]] = [
    (arithmetic.negate_integer, operator.neg, INTEGERS),
    (arithmetic.absolute_integer, abs, INTEGERS),
    (arithmetic.exact_float, float, INTEGERS),
    (arithmetic.truncate_float, int, FLOATS),
    (arithmetic.square_root, math.sqrt, FLOATS),
    (arithmetic.floor_float, math.floor, FLOATS),
    (arithmetic.ceil_float, math.ceil, FLOATS),
]


def compute(function: Callable[..., Any], *operands: Any) -> Any:
    """Return the result, or None where there is none of 64 bits."""
    try:
        result = function(*operands)
    except (ArithmeticError, ValueError):
        return None
    return None if isinstance(result, int) and not -INT_MAX - 1 <= result <= INT_MAX else result


@pytest.mark.parametrize(
    ("helper", "python", "edges", "count"),
    [(*case, 2) for case in TWO] + [(*case, 1) for case in ONE],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_helper_has_pythons_result_or_none(
    helper: Callable[..., Any], python: Callable[..., Any], edges: list[Any], count: int
) -> None:
    numba: Any = importlib.import_module("numba")
    compiled = numba.njit(helper)
    rng = random.Random(7)
    is_float = edges is FLOATS
    values = edges + [
        rng.uniform(-1e6, 1e6) if is_float else rng.randrange(-(2 ** rng.randrange(1, 63)), 2**40)
        for _ in range(40)
    ]
    known = 0
    for first in values:
        for second in values if count == 2 else [None]:
            operands = (first, second)[:count]
            result, expected = compute(compiled, *operands), compute(python, *operands)
            known += result is not None
            assert result is None or repr(result) == repr(expected), operands
            assert type(result) in (type(None), type(expected)), operands
    assert known > len(values) // 3


def test_no_sum_or_product_of_64_bits_is_unknown() -> None:
    numba: Any = importlib.import_module("numba")
    for helper, python, _ in TWO[:3]:
        compiled = numba.njit(helper)
        for first in INTEGERS:
            for second in INTEGERS:
                expected = compute(python, first, second)
                is_edge = python is operator.mul and -INT_MAX - 1 in (first, second, expected)
                assert is_edge or compute(compiled, first, second) == expected
