"""The promised ratios, and whether a run keeps them: `script/bench --check`.

promises.json holds one number a ratio: the median that was measured on a quiet machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.spread import Spread

PATH = Path(__file__).with_name("promises.json")


def read_promises() -> dict[str, float]:
    """Return the promised median of each ratio, by the name that `ratios` gives it."""
    promises: dict[str, float] = json.loads(PATH.read_text(encoding="utf-8"))
    return promises


def find_broken(measured: Mapping[str, Spread], promises: Mapping[str, float]) -> list[str]:
    """Return a sentence for each ratio that was below its promise in every turn.

    Ratios that were not measured, or not promised, are passed over.
    """
    return [
        f"{name}: {ratio.shown(2)} where {promises[name]:.2f} is promised"
        for name, ratio in measured.items()
        if name in promises and ratio.greatest < promises[name]
    ]
