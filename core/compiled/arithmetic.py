"""The arithmetic of compiled functions: Python's results in 64 bits, or an ArithmeticError.

The text of this module is the head of each kernel, where numba compiles it; here it is ordinary
Python. An ArithmeticError means that Python's result may differ, or be an error. Then the batch is
computed by Python, so a wrapped integer is never a result.
"""

from __future__ import annotations

import math

INT_MIN = -(2**63)
INT_MAX = 2**63 - 1
EXACT_MAX = 2**53
"""The limit up to which each integer is a float exactly."""
HALF_MAX = 2**31
"""The limit below which the product of two factors fits into 64 bits."""


# Each function checks before it computes: for an operation that overflows, the compiler may assume
# anything.


def add_integers(a: int, b: int) -> int:
    """Return a + b."""
    if (b > 0 and a > INT_MAX - b) or (b < 0 and a < INT_MIN - b):
        raise ArithmeticError
    return a + b


def subtract_integers(a: int, b: int) -> int:
    """Return a - b."""
    if (b < 0 and a > INT_MAX + b) or (b > 0 and a < INT_MIN + b):
        raise ArithmeticError
    return a - b


def multiply_integers(a: int, b: int) -> int:
    """Return a * b. If a factor is `INT_MIN`, leave the product to Python."""
    if not (-HALF_MAX < a < HALF_MAX and -HALF_MAX < b < HALF_MAX):
        if a == INT_MIN or b == INT_MIN:  # noqa: PLR1714 - no tuple in a kernel
            raise ArithmeticError
        if b != 0 and abs(a) > INT_MAX // abs(b):
            raise ArithmeticError
    return a * b


def floor_divide_integers(a: int, b: int) -> int:
    """Return a // b."""
    if b == 0 or (b == -1 and a == INT_MIN):
        raise ArithmeticError
    return a // b


def modulo_integers(a: int, b: int) -> int:
    """Return a % b."""
    if b == 0:
        raise ArithmeticError
    if b == -1:
        return 0
    return a % b


def divide_integers(a: int, b: int) -> float:
    """Return a / b for integers up to `EXACT_MAX`.

    The quotient of larger ones would be rounded twice; Python rounds it once.
    """
    if b == 0 or not (-EXACT_MAX <= a <= EXACT_MAX and -EXACT_MAX <= b <= EXACT_MAX):
        raise ArithmeticError
    return float(a) / float(b)


def negate_integer(a: int) -> int:
    """Return -a."""
    if a == INT_MIN:
        raise ArithmeticError
    return -a


def absolute_integer(a: int) -> int:
    """Return abs(a)."""
    if a == INT_MIN:
        raise ArithmeticError
    return -a if a < 0 else a


def exact_float(a: int) -> float:
    """Return `a` as a float of exactly the same value, for a comparison with a float."""
    if not -EXACT_MAX <= a <= EXACT_MAX:
        raise ArithmeticError
    return float(a)


def divide_floats(a: float, b: float) -> float:
    """Return a / b."""
    if b == 0.0:
        raise ArithmeticError
    return a / b


def floor_divide_floats(a: float, b: float) -> float:
    """Return a // b for finite values."""
    if b == 0.0 or not (math.isfinite(a) and math.isfinite(b)):
        raise ArithmeticError
    return a // b


def modulo_floats(a: float, b: float) -> float:
    """Return a % b for finite values."""
    if b == 0.0 or not (math.isfinite(a) and math.isfinite(b)):
        raise ArithmeticError
    return a % b


def truncate_float(a: float) -> int:
    """Return int(a)."""
    # Both bounds are exact floats. A NaN is not within them.
    if not -9223372036854775808.0 <= a < 9223372036854775808.0:
        raise ArithmeticError
    return int(a)


def square_root(a: float) -> float:
    """Return math.sqrt(a)."""
    if a < 0.0:
        raise ArithmeticError
    return math.sqrt(a)


def floor_float(a: float) -> int:
    """Return math.floor(a)."""
    if not -9223372036854775808.0 <= a < 9223372036854775808.0:
        raise ArithmeticError
    return int(math.floor(a))  # noqa: RUF046 - of numba it is a float


def ceil_float(a: float) -> int:
    """Return math.ceil(a)."""
    if not -9223372036854775808.0 <= a < 9223372036854775808.0:
        raise ArithmeticError
    return int(math.ceil(a))  # noqa: RUF046 - of numba it is a float


def least(a: float, b: float) -> float:
    """Return min(a, b). If the values are equal, or one is NaN, return `a`."""
    return b if b < a else a  # noqa: FURB136 - numba's min has another NaN


def greatest(a: float, b: float) -> float:
    """Return max(a, b). If the values are equal, or one is NaN, return `a`."""
    return b if b > a else a  # noqa: FURB136 - numba's max has another NaN


HELPERS = (
    add_integers,
    subtract_integers,
    multiply_integers,
    floor_divide_integers,
    modulo_integers,
    divide_integers,
    negate_integer,
    absolute_integer,
    exact_float,
    divide_floats,
    floor_divide_floats,
    modulo_floats,
    truncate_float,
    square_root,
    floor_float,
    ceil_float,
    least,
    greatest,
)
"""The functions that a kernel may call."""
