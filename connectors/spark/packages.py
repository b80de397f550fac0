"""The pickling of objects for Spark's Python workers, with a check of onceflow's version there.

Without the check, the error would say that some module cannot be unpickled. With another version,
it could say anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from onceflow.core.version import VERSION

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSource


class Shipped:
    """An object that is pickled on the driver and used by tasks.

    Unpickling raises if onceflow is missing, or has another version than on the driver.
    """

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return _pack(partial(_unpack, type(self), self.attributes_to_ship()))

    def attributes_to_ship(self) -> dict[str, object]:
        """Return the attributes to pickle: all, unless overridden."""
        return self.__dict__


class ShippedFormat:
    """A format for `spark.dataSource.register`. It unpickles as the class, after the version check.

    Spark's Python workers next to the driver unpickle it before they plan.
    """

    def __init__(self, kind: type[DataSource]) -> None:
        self._kind = kind

    def name(self) -> str:
        """Return the format's name."""
        return self._kind.name()

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return _pack(partial(_itself, self._kind))


def _pack(make: Callable[[], object]) -> tuple[Callable[..., object], tuple[object, ...]]:
    import cloudpickle

    # These bytes inside the pickle are unpickled only after the versions were compared.
    return _unpacker(), (VERSION, sys.executable, cloudpickle.dumps(make))


def _unpack(kind: type[Shipped], attributes: dict[str, object]) -> Shipped:
    made: Shipped = kind.__new__(kind)
    made.__dict__.update(attributes)
    return made


def _itself(kind: type[DataSource]) -> type[DataSource]:
    return kind


def _unpacker() -> Callable[[str, str, bytes], object]:
    """Return a function that is pickled by value, so that it runs even without onceflow."""

    def unpack(driver_version: str, driver_python: str, pickled: bytes) -> object:
        import platform
        import sys
        from importlib import import_module

        process = f"on {platform.node()} ({sys.executable})"
        advice = (
            f"the driver runs {driver_python}. If that Python is on the executors, too, let"
            " Spark's workers run it: set os.environ['PYSPARK_PYTHON'] = sys.executable before"
            " you make the session. Otherwise send onceflow with --py-files or spark.archives,"
            " or put it into the executors' image, as the page 'Spark formats' shows"
        )
        try:
            version: str = import_module("onceflow.core.version").VERSION
        except ImportError as error:
            raise RuntimeError(
                f"onceflow {driver_version}, which the driver has, is missing {process}:"
                f" {error}; {advice}"
            ) from None
        if version != driver_version:
            raise RuntimeError(
                f"onceflow is {version} {process}, but {driver_version} on the driver; both must"
                f" have the same version: {advice}"
            )
        pickle: Any = import_module("pickle")
        return pickle.loads(pickled)()

    return unpack
