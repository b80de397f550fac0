"""Removes Spark's zips from the path of each Python process that has this directory on its path.

Python imports `sitecustomize` at its start. `local_workers` puts this directory on the path of the
Python workers of a local master. Another `sitecustomize` on the path is run afterwards. Nothing
here may fail: then a worker starts as it would without this file.

Spark starts a dozen Python processes for a query, some of which only print a version. So this file
imports only what every Python process has already.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder, SourceFileLoader

_HERE = os.path.realpath(__file__)


def _leave_zips() -> None:
    name = "_onceflow_unpacked_spark"
    file = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "unpacked_spark.py")
    module = type(sys)(name)
    SourceFileLoader(name, file).exec_module(module)
    module.leave_zips()


def _run_next() -> None:
    """Run the `sitecustomize` that this one hides."""
    directory = os.path.dirname(_HERE)
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != directory]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_leave_zips()
_run_next()
