"""References to secrets in settings, which are resolved only where the secret is used.

    ${env:NAME}      the environment variable NAME of the process that connects
    ${file:/path}    the text of a file on that machine, without the line break at its end

A description with a reference is pickled, logged and stored without the secret. The driver and all
executors must be able to resolve it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from onceflow.core.errors import SettingsRefused

_REFERENCE = re.compile(r"\$\{(env|file):([^}]*)\}")


def has_reference(text: str) -> bool:
    """Return True if `text` contains a reference."""
    return _REFERENCE.search(text) is not None


def follow_references(text: str, *, setting: str) -> str:
    """Return `text` with every reference replaced by its current secret.

    Do not keep the result longer than the connection that it is for, because a file may be rotated.

    Raises:
        SettingsRefused: A variable is not set here, or a file cannot be read. The message names
            `setting` and the reference, but no secret.
    """
    return _REFERENCE.sub(lambda match: _value(match[1], match[2], setting), text)


def _value(kind: str, name: str, setting: str) -> str:
    if kind == "env":
        value = os.environ.get(name)
        if value is None:
            raise SettingsRefused(
                f"{setting}: environment variable {name} is not set in process {os.getpid()}; set"
                " it where the driver and where every executor runs (Spark:"
                f" spark.executorEnv.{name}), or use ${{file:…}}"
            )
        return value
    try:
        return Path(name).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SettingsRefused(
            f"{setting}: the secret's file {name!r} cannot be read here: {reason}; it must be"
            " readable where the driver and where every executor runs"
        ) from None
