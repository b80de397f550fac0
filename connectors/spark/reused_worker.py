"""The reduction of the cost of reused Python workers of Spark.

Spark's Python workers call `gc.collect()` between tasks. With our libraries imported, this takes
0.07 s of processor time, more than the rest of a small batch. `gc.freeze()` exempts the imported
modules from it.
"""

from __future__ import annotations

import gc

_frozen: list[bool] = []


def spare_imports() -> None:
    """Exempt all objects of this process from later garbage collections; only the first call acts.

    Call it at the end of the first use, when all modules are imported. An exempt object is still
    freed when its last reference goes, unless it is part of a cycle.
    """
    if not _frozen:
        _frozen.append(True)
        gc.freeze()
