"""The address of a table in a catalog, and the access to the catalog."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.imports import naming_extras
from onceflow.core.secret_references import follow_references
from onceflow.sinks.lake.table import describe_error

if TYPE_CHECKING:  # a program without the extra gets an error that names it
    from pyiceberg.catalog import Catalog

_HIDDEN_LENGTH_MIN = 4
"""The shortest value that is hidden. Shorter ones are no secrets, and occur in other words."""
_REST_CATALOG = "onceflow.sinks.iceberg.rest_catalog.RestCatalogWithDeadlines"


@dataclass(frozen=True)
class TableAddress:
    """A branch of a table in a catalog."""

    table: tuple[str, ...]
    """The namespaces and the name."""
    branch: str
    catalog_name: str
    properties: Mapping[str, str] = field(repr=False)
    """The properties of the catalog; values may refer to secrets."""

    def __str__(self) -> str:
        branch = "" if self.branch == "main" else f" (branch {self.branch})"
        return f"Iceberg table {'.'.join(self.table)}{branch}"

    def require_library(self) -> None:
        """Raise MissingExtra unless pyiceberg is installed here."""
        with naming_extras():
            importlib.import_module("pyiceberg.table")

    def open_catalog(self) -> Catalog:
        """Return the catalog; the caller closes it.

        Raises:
            ConfigError: pyiceberg cannot create such a catalog.
            SinkError: The catalog cannot be reached now.
        """
        from pyiceberg.catalog import load_catalog
        from pyiceberg.utils.config import Config

        setting = f"the catalog of {self}"
        properties = {
            name: follow_references(value, setting=f"{setting}, property {name!r}")
            for name, value in self.properties.items()
        }
        # Settings of the catalog in pyiceberg's own configuration file would contradict the class.
        if _is_rest(properties) and Config().get_catalog_config(self.catalog_name) is None:
            properties = {name: value for name, value in properties.items() if name != "type"}
            properties["py-catalog-impl"] = _REST_CATALOG
        try:
            return load_catalog(self.catalog_name, **properties)
        except Exception as error:
            refusal = _to_refusal(f"{setting} ({self.catalog_name!r})", error, properties)
        # Raise without the cause, which may quote a URL or a header with a secret.
        raise refusal


def _to_refusal(
    what: str, error: Exception, properties: Mapping[str, str]
) -> ConfigError | SinkError:
    from pydantic import ValidationError
    from pyiceberg.exceptions import NotInstalledError

    # An answer that is not from a catalog comes from a gateway in front of it.
    if isinstance(error, NotInstalledError | ValueError) and not isinstance(error, ValidationError):
        return ConfigError(f"{what}: {_hide_values(str(error), properties)}")
    return SinkError(f"{what} cannot be reached: {_hide_values(describe_error(error), properties)}")


def _hide_values(text: str, properties: Mapping[str, str]) -> str:
    """Return `text` with the values of `properties` replaced by asterisks, except the type."""
    values = [value.strip() for name, value in properties.items() if name != "type"]
    # A library quotes a value with escaped line ends.
    values += [repr(value)[1:-1] for value in values]
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _HIDDEN_LENGTH_MIN:
            text = text.replace(value, "***")
    return text


def _is_rest(properties: Mapping[str, str]) -> bool:
    """Return True if pyiceberg would use its own REST client for the catalog."""
    if "py-catalog-impl" in properties:
        return False
    kind = properties.get("type") or (
        "rest" if properties.get("uri", "").startswith("http") else ""
    )
    return kind.lower() == "rest"
