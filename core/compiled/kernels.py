"""Kernels in machine code, compiled once by numba and then cached on disk.

A kernel is a module in `compiled/<digest>/` of the cache directory, and numba stores its machine
code next to it. The digest is that of the whole text, so a changed function has another directory.
numba itself compiles again for another version of itself or another processor. If the directory
cannot be written, or other users could write to it, nothing is stored: a kernel is then compiled at
each start.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from onceflow.core.compiled import arithmetic
from onceflow.core.errors import ConfigError
from onceflow.core.imports import naming_extras, require_package
from onceflow.core.local_files import cache_directory, is_private, publish
from onceflow.core.plan.compiled_function import BOOLEAN, FLOAT, CompiledFunction, Kind

Kernel: TypeAlias = Callable[..., int]

_log = logging.getLogger("onceflow.compiled")

_COMPILE = """

import numba as _numba

for _helper in HELPERS:
    globals()[_helper.__name__] = _numba.njit(_helper)


def _read(values):
    # Arrow's arrays cannot be written to, and an array that can be is taken, too.
    return _numba.types.Array(values, 1, "C", readonly=True)


@_numba.njit({signature}, cache=_CACHED, nogil=True)
"""


def load_kernel(function: CompiledFunction) -> Kernel:
    """Return the machine code of `function`. Compiles it unless the machine code is on disk.

    The first compilation takes about a second. Runs on the driver while the pipeline is built, and
    in each slot when the operator opens.

    Raises:
        MissingExtra: numba is not installed here.
        ConfigError: numba cannot compile the function.
    """
    require_package("numba")
    text = inspect.getsource(arithmetic) + _COMPILE.format(signature=_signature(function))
    try:
        with naming_extras():
            return _load(text + function.source)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{function.name} cannot be compiled by numba: {error}; leave compiled=True out, and it"
            " runs as Python"
        ) from error


@lru_cache(maxsize=64)
def _load(text: str) -> Kernel:
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    name = f"onceflow_kernel_{digest}"
    path = _publish_module(cache_directory() / "compiled" / digest, text)
    if path is not None:
        try:
            return _import_kernel(name, path)
        except Exception as error:
            # The files may be damaged. A function that cannot be compiled fails below, too.
            _log.warning("the machine code beside %s is of no use: %r", path, error)
    return _execute(ModuleType(name), lambda module: exec(text, module.__dict__), is_kept=False)  # noqa: S102


def _import_kernel(name: str, path: Path) -> Kernel:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    return _execute(importlib.util.module_from_spec(spec), spec.loader.exec_module, is_kept=True)


def _execute(
    module: ModuleType, execute: Callable[[ModuleType], object], *, is_kept: bool
) -> Kernel:
    module.__dict__["_CACHED"] = is_kept
    # numba looks up the module of a function that is cached on disk.
    sys.modules[module.__name__] = module
    execute(module)
    kernel: Kernel = module.__dict__["kernel"]
    return kernel


def _publish_module(directory: Path, text: str) -> Path | None:
    """Return the file with `text` in `directory`, or None if it cannot be stored safely."""
    path = directory / "kernel.py"
    try:
        if not directory.is_dir():
            with publish(directory) as fresh:
                (fresh / path.name).write_text(text)
        return path if is_private(directory) and path.read_text() == text else None
    except OSError:
        return None


def _signature(function: CompiledFunction) -> str:
    """Return the types of the kernel's arguments, in numba's notation."""
    integers = "_numba.int64[::1]"
    arguments = ["_numba.int64", "_read(_numba.int64)"]
    arguments += [f"_read({_number(kind)})" for _, kind in function.columns]
    arguments += [_number(kind) for _, kind in function.constants]
    for state in function.states:
        arguments += [f"{_number(state.kind)}[::1]", "_numba.boolean[::1]"]
    arguments.append(integers)
    computed = [column for column in function.outputs if column.passed_on is None]
    arguments += [f"{_number(column.kind)}[::1]" for column in computed]
    return f"_numba.int64({', '.join(arguments)})"


def _number(kind: Kind) -> str:
    return {FLOAT: "_numba.float64", BOOLEAN: "_numba.boolean"}.get(kind, "_numba.int64")
