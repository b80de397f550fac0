"""Whatever a function consists of, compiled it does what it does as Python."""

from __future__ import annotations

import importlib.util
import math
import os
import random
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.unit.compiled.keyed_operators import run_operator
from tests.unit.compiled.random_functions import FunctionText

from onceflow import KeyedFunction

pytest.importorskip("numba")

SEED = int(os.environ.get("ONCEFLOW_TEST_SEED", "1"))
TIME = pa.timestamp("us")
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("n", pa.int64()),
        ("k", pa.int32()),
        ("x", pa.float64()),
        ("f", pa.bool_()),
        ("t", TIME),
        ("u", TIME),
        ("note", pa.string()),
    ]
)
_INTEGERS = (0, 1, -1, 2**31, 2**53 + 1, 2**62, -(2**63), 2**63 - 1)
_FLOATS = (0.0, -0.0, 1.0, math.nan, math.inf, -math.inf, 1e300, 2.0**63, -(2.0**63), 5e-324)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_random_functions_do_the_same_compiled_and_as_python(tmp_path: Path) -> None:
    """By the same records one after the other and in batches; edges of every type are drawn."""
    compiled_batches = 0
    for seed in range(SEED, SEED + 100):
        function = _load(seed, tmp_path)
        rng = random.Random(f"rows {seed}")
        batches = [_draw_rows(rng, edges=share) for share in (0.0, 0.0, 0.05, 0.3)]
        python = run_operator(function(), SCHEMA, batches, compiled=False)
        compiled = run_operator(function(), SCHEMA, batches, compiled=True)
        assert compiled.text == python.text, f"seed {seed}"
        assert (compiled.error is None) == (python.error is None), f"seed {seed}: {compiled.error}"
        compiled_batches += len(batches) - compiled.uncompiled_batches
    # Most functions meet an edge somewhere; if all did, nothing compiled would have been compared.
    assert compiled_batches > 100


def _load(seed: int, directory: Path) -> type[KeyedFunction]:
    path = directory / f"drawn_{seed}.py"
    path.write_text(FunctionText(seed).draw())
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn: type[KeyedFunction] = module.Drawn
    return drawn


def _draw_rows(rng: random.Random, edges: float) -> pa.RecordBatch:
    rows = [_draw_row(rng, edges) for _ in range(40)]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def _draw_row(rng: random.Random, edges: float) -> dict[str, Any]:
    is_edge = rng.random() < edges
    at = datetime(2026, 1, 1) + timedelta(seconds=rng.randint(-5, 5))
    return {
        "key": rng.choice("abc"),
        "n": rng.choice(_INTEGERS) if is_edge else rng.randint(-50, 50),
        "k": rng.randint(-9, 9),
        "x": rng.choice(_FLOATS) if is_edge else rng.choice([0.5, 1.25, -3.0, 7.75]),
        "f": rng.random() < 0.5,
        "t": at,
        "u": at + timedelta(seconds=rng.choice([-1, 0, 1])),
        "note": rng.choice(["", "x", None]),
    }
