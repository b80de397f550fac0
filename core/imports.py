"""The lazy import of public names (PEP 562), and the extras that install optional packages.

Code imports such a package inside `naming_extras`. It uses `naming_one_extra` if several extras
install the package, or if a dependency of the package comes with an extra.

A package with lazy names lists each name three times: for type checkers (an import below
`TYPE_CHECKING`), in `__all__`, and in the table of modules. A unit test compares the three.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
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


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of `package`. `modules` maps module to public names.

    At its first use a name becomes an ordinary attribute of the package, so later uses cost
    nothing. Errors from importing its module are raised unchanged, except that a missing package of
    an extra raises MissingExtra.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def get_attribute(name: str) -> object:
        module = module_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with naming_extras():
            value: object = getattr(import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return get_attribute, list_names
