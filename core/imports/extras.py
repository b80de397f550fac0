"""The packages that extras of onceflow install, and the error that names a missing extra.

Code imports such a package inside `naming_extras`. It uses `naming_one_extra` if several extras
install the package, or if a dependency of the package comes with an extra.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from onceflow.core.errors import MissingExtra

EXTRA_OF_PACKAGE: Mapping[str, str] = MappingProxyType(
    {
        "adbc_driver_manager": "postgres",
        "adbc_driver_postgresql": "postgres",
        "confluent_kafka": "kafka",
        "datafusion": "sql",
        "deltalake": "delta",
        "fastavro": "schema-registry",
        "numba": "compiled",
        "opentelemetry": "otel",
        "pandas": "pandas",
        "pgpq": "postgres",
        "prometheus_client": "metrics",
        "psycopg": "postgres",
        "pyiceberg": "iceberg",
        "pymysql": "mysql",
        "rich": "cli",
        "rocksdict": "rocksdb",
        "typer": "cli",
        "urllib3": "hdfs",
    }
)
"""The extra of each package, by import name."""


def find_missing_extra(error: ImportError) -> MissingExtra | None:
    """Return the error that names the extra, or None if `error` is about another package."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRA_OF_PACKAGE.get(package)
    return None if extra is None else make_missing(package, extra)


@contextmanager
def naming_extras() -> Generator[None]:
    """Raise MissingExtra in place of ModuleNotFoundError for a package that an extra installs.

    Raises:
        MissingExtra: The package is not installed here. The message names the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = find_missing_extra(error)
        if missing is None:
            raise
        raise missing from error


@contextmanager
def naming_one_extra(extra: str) -> Generator[None]:
    """Raise MissingExtra for `extra` in place of ModuleNotFoundError for any package.

    Raises:
        MissingExtra: A package is not installed here. The message names it and the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise make_missing(str(error.name), extra) from error


def require_package(package: str) -> None:
    """Raise MissingExtra if `package`, which an extra installs, is not installed here."""
    with naming_extras():
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"no package {package}", name=package)


def make_missing(package: str, extra: str) -> MissingExtra:
    """Return the error for a missing `package`, which `extra` installs."""
    return MissingExtra(
        f"the package {package} is not installed here: install onceflow[{extra}] where the driver"
        " and where the slots run"
    )
