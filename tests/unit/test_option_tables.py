"""The tables of options in the documents have every option of the code, with its default.

The comment before a table names its object: `<!-- options: onceflow.Pipeline -->`.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from onceflow.core.settings.known_settings import OPTIONS

_ROOT = Path(__file__).parents[2]
_NEEDED = "needed"
_TABLE = re.compile(r"^<!-- options: ([\w.]+) -->\n((?:\|.*\n)+)", re.MULTILINE)
_LINE = re.compile(r"\| `(\w+)` \| (?:`(.*?)`|(needed)) \| ")


def _tables() -> list[tuple[str, str, str]]:
    return [
        (path.name, name, table)
        for path in sorted((_ROOT / "docs").rglob("*.md"))
        for name, table in _TABLE.findall(path.read_text(encoding="utf-8"))
    ]


def _shown(table: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for line in table.splitlines()[2:]:
        match = _LINE.match(line)
        assert match, f"no line of options: {line}"
        found[match[1]] = _NEEDED if match[3] else ast.literal_eval(match[2])
    return found


def _actual(name: str) -> dict[str, object]:
    described: Any = pkgutil.resolve_name(name)
    found: dict[str, object] = {}
    for parameter in inspect.signature(described).parameters.values():
        if parameter.name == "self":
            continue
        default = parameter.default
        if default is inspect.Parameter.empty:
            default = _NEEDED
        found[parameter.name] = default.value if isinstance(default, Enum) else default
    return found


@pytest.mark.parametrize(
    ("document", "name", "table"), _tables(), ids=[f"{d}:{n}" for d, n, _ in _tables()]
)
def test_a_table_of_options_says_what_the_code_does(document: str, name: str, table: str) -> None:
    assert _shown(table) == _actual(name), document


def test_the_table_of_settings_is_that_of_the_code() -> None:
    document = (_ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    table = document.partition("<!-- settings -->\n")[2].partition("\n\n")[0]
    lines = ["| setting | default | in Flink |", "|---|---|---|"]
    for option in OPTIONS:
        flink = ", ".join(f"`{name}`" for name in option.flink) or "–"
        lines.append(f"| `{option.name}` | `{option.to_text(option.default)}` | {flink} |")
    assert table.splitlines() == lines


def test_every_object_that_a_user_sets_options_of_has_a_table() -> None:
    tables = {name for _, name, _ in _tables()}
    assert tables >= {
        "onceflow.Checkpointing",
        "onceflow.ExponentialDelay",
        "onceflow.FailureRate",
        "onceflow.FileSystemStorage",
        "onceflow.FixedDelay",
        "onceflow.KeyedStream.interval_join",
        "onceflow.KeyedStream.join",
        "onceflow.KeyedConnectedStreams.window",
        "onceflow.MemoryStorage",
        "onceflow.ObjectStorage",
        "onceflow.Pipeline",
        "onceflow.RocksDBBackend",
        "onceflow.RuntimeSettings",
        "onceflow.StateTtlConfig",
        "onceflow.TlsFiles",
        "onceflow.WatermarkStrategy",
        "onceflow.sinks.KafkaSink",
        "onceflow.sinks.PostgresSink",
        "onceflow.sources.DatagenSource",
        "onceflow.sources.KafkaSource",
        "onceflow.sources.NexmarkSource",
    }
