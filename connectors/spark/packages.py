"""Objects that reach executors with a check: is onceflow there, and in the driver's version?

What Spark says otherwise is that some module cannot be unpickled, or, with another version there,
anything at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onceflow.core.version import VERSION


class Shipped:
    """An object that is pickled on the driver and used by tasks.

    Unpickling it raises where onceflow is missing, or is of another version than the driver's.
    """

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        import cloudpickle

        state = (type(self), self.shipped())
        return _unpacker(), (VERSION, cloudpickle.dumps(state))

    def shipped(self) -> dict[str, object]:
        """Return the attributes that travel: all, unless overridden."""
        return self.__dict__


def _unpacker() -> Callable[[str, bytes], object]:
    """Return a function that travels by value, so that it runs where onceflow is not installed."""

    def unpack(driver_version: str, pickled: bytes) -> object:
        import platform
        import sys
        from importlib import import_module

        here = f"on {platform.node()} ({sys.executable})"
        advice = (
            "ship it with --py-files, spark.archives or the executors' image, as the page"
            " 'Spark formats' shows"
        )
        try:
            version: str = import_module("onceflow.core.version").VERSION
        except ImportError as error:
            raise RuntimeError(
                f"onceflow {driver_version} of the driver is missing {here}: {error}; {advice}"
            ) from None
        if version != driver_version:
            raise RuntimeError(
                f"onceflow is {version} {here}, and {driver_version} on the driver;"
                f" both must be one version: {advice}"
            )
        pickle: Any = import_module("pickle")
        kind, attributes = pickle.loads(pickled)
        made = kind.__new__(kind)
        made.__dict__.update(attributes)
        return made

    return unpack
