"""Removes Spark's zips from the path of each Python process that has this directory on its path.

Python imports `sitecustomize` at its start. `local_workers` puts this directory on the path of the
Python workers of a local master. Another `sitecustomize` on the path is run afterwards. Nothing
here may fail: then a worker starts as it would without this file.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_HERE = Path(__file__).resolve()


def _leave_zips() -> None:
    spec = spec_from_file_location(
        "_onceflow_unpacked_spark", _HERE.parents[1] / "unpacked_spark.py"
    )
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        module.leave_zips()


def _run_next() -> None:
    """Run the `sitecustomize` that this one hides."""
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _HERE.parent]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_leave_zips()
_run_next()
