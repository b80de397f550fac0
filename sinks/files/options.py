"""Storage options: references to secrets in them, and what must never be printed of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from onceflow.core.secret_references import followed

_SECRET = re.compile(r"secret|passw|token|sas|credential|key|connection_string", re.IGNORECASE)
_SECRET_LENGTH_MIN = 4


def followed_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` with references to secrets followed, for a client about to be opened.

    Raises:
        ConfigError: One cannot be followed here.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            found[name] = followed_options(cast("Mapping[str, Any]", value))
        elif isinstance(value, str):
            found[name] = followed(value, setting=f"storage_options[{name!r}]")
        else:
            found[name] = value
    return found


def secrets_of(options: Mapping[str, Any], *, known_secret: bool = False) -> list[str]:
    """Return every text in `options` that its name says must not be printed, longest first."""
    found: list[str] = []
    for name, value in options.items():
        secret = known_secret or _SECRET.search(name) is not None
        if isinstance(value, Mapping):
            found += secrets_of(cast("Mapping[str, Any]", value), known_secret=secret)
        elif secret and isinstance(value, str) and len(value) >= _SECRET_LENGTH_MIN:
            found.append(value)
    return sorted(found, key=len, reverse=True)
