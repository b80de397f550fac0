"""The readers of configuration files: TOML, and Flink's files in YAML or lines of `key: value`.

The file's name determines the format. `flink-conf.yaml` is Flink 1's file, read line by line as in
Flink. Any other name that ends in `.yaml` or `.yml` has the format of Flink 2's `config.yaml`. All
other files are TOML.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from onceflow.core.errors import ConfigError

_FLINK_1 = "flink-conf.yaml"
_YAML_SUFFIXES = frozenset({".yaml", ".yml"})
_NO_VALUE = frozenset({"", "~", "null", "Null", "NULL"})
_DEPTH_MAX = 20
"""The maximum depth. Flink's deepest name has eight parts. Only a YAML file that contains itself is
deeper."""


@dataclass(frozen=True, slots=True)
class WrittenSetting:
    """A setting in a file: its dotted name, its value, and the file with the line if known."""

    name: str
    location: str
    value: object


def is_flink_file(path: Path) -> bool:
    """Return True if `path` has the suffix of a Flink configuration file."""
    return path.suffix.lower() in _YAML_SUFFIXES


def read_settings(path: Path) -> list[WrittenSetting]:
    """Read all settings of a file, in the order of the file.

    Raises:
        ConfigError: The file cannot be read, or does not have the format that its name implies.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.name == _FLINK_1:
            return list(_read_lines(path, text))
        if is_flink_file(path):
            return list(_read_yaml(path, text))
        return list(_read_toml(path, text))
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration file {path} is not UTF-8: {error}") from None


# --- TOML ----------------------------------------------------------------------------------------


def _read_toml(path: Path, text: str) -> Iterator[WrittenSetting]:
    try:
        table = parse_toml(text)
    except ValueError as error:
        raise ConfigError(
            f"configuration file {path} is not TOML: {error}. Flink's own YAML is read too, from a"
            " file whose name ends in .yaml or .yml"
        ) from None
    for name, value in flatten_table(table, ""):
        yield WrittenSetting(name, f"file {path}", value)


def parse_toml(text: str) -> dict[str, object]:
    """Return the tables of `text`.

    Raises:
        ValueError: It is not TOML. The message has the position.
    """
    # Python 3.10 has no tomllib; its backport has the same names.
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    table: dict[str, object] = toml.loads(text)
    return table


def flatten_table(table: Mapping[str, object], above: str) -> Iterator[tuple[str, object]]:
    """Yield the values of `table` and its nested tables with their dotted names."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from flatten_table(cast("dict[str, object]", value), f"{above}{name}.")
        else:
            yield f"{above}{name}", value


# --- Flink's -------------------------------------------------------------------------------------


def _read_lines(path: Path, text: str) -> Iterator[WrittenSetting]:
    """Read Flink 1's file: lines of `key: value`, comments after `#`. Other lines are skipped.

    Source: Flink 1.20, GlobalConfiguration.loadLegacyYAMLResource.
    """
    for number, line in enumerate(text.splitlines(), 1):
        # Split at colon and space, as Flink does: values such as `hdfs://host:8020` contain a
        # colon, too.
        name, colon, value = line.partition("#")[0].strip().partition(": ")
        if colon and name.strip() and value.strip():
            yield WrittenSetting(name.strip(), f"file {path}:{number}", value.strip())


def _read_yaml(path: Path, text: str) -> Iterator[WrittenSetting]:
    yaml = importlib.import_module("yaml")
    try:
        # The base loader leaves scalars as text, because each option parses its own type.
        root: Any = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        reason = re.sub(r"\s+", " ", str(error))
        raise ConfigError(f"configuration file {path} is not YAML: {reason}") from None
    if root is not None:
        yield from _walk(path, root, "", 0)


def _walk(path: Path, node: Any, above: str, depth: int) -> Iterator[WrittenSetting]:
    location = f"file {path}:{node.start_mark.line + 1}"
    if node.id != "mapping" or depth > _DEPTH_MAX:
        raise ConfigError(f"{location}: expected a table of settings, one `name: value` a line")
    for key, value in node.value:
        # Marks count lines from 0.
        location = f"file {path}:{key.start_mark.line + 1}"
        if key.id != "scalar":
            raise ConfigError(
                f"{location}: expected the name of a setting, a plain word, before the colon"
            )
        name = f"{above}{key.value}"
        if value.id == "mapping":
            yield from _walk(path, value, f"{name}.", depth + 1)
        elif value.id == "sequence":
            yield WrittenSetting(name, location, [item.value for item in value.value])
        elif value.value not in _NO_VALUE:
            yield WrittenSetting(name, location, value.value)
