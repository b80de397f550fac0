"""Secrets by reference: settings say where a secret is, and only who uses it ever looks.

    ${env:NAME}      the environment variable NAME of the process that connects
    ${file:/path}    the text of a file on that machine, without the line break at its end

A description with a reference in it is pickled, logged and stored without the secret. Driver and
executors must all be able to follow it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from onceflow.core.errors import SettingsRefused

_REFERENCE = re.compile(r"\$\{(env|file):([^}]*)\}")


def has_reference(text: str) -> bool:
    """Return whether `text` holds a reference to follow."""
    return _REFERENCE.search(text) is not None


def follow_references(text: str, *, setting: str) -> str:
    """Return `text` with every reference replaced by the secret that it names, read now.

    Never keep the result longer than the connection that it is for: a file may be rotated.

    Raises:
        SettingsRefused: A variable is not set here, or a file cannot be read; names `setting` and
            the reference, never a secret.
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
