"""What the doctor is told of a broker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onceflow.core.errors import ConfigError
from onceflow.sources.kafka.settings import RULES


@dataclass(frozen=True, slots=True)
class KafkaQuestion:
    """Which broker is asked, and about what."""

    servers: str
    topics: tuple[str, ...] = ()
    group: str | None = None
    options: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    parallelism: int = 1
    timeout_s: float = 30.0


def read_options(path: Path) -> dict[str, str]:
    """Return the client options in the properties file `path`: one name=value a line.

    Raises:
        ConfigError: It cannot be read, or holds something else. Never repeats a value.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--kafka-options {path}: {reason}") from None
    options: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, value = line.partition("=")
        if not separator:
            raise ConfigError(f"--kafka-options {path}, line {number} is not name=value")
        options[name.strip()] = value.strip()
    return RULES.accepted(options)
