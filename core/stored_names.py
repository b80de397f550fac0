"""The check of file names read from storage: manifests, state handles, data file descriptions.

A user who can write to checkpoint storage can decide what a job commits. They must not gain access
to other files. So a stored name must not lead out of its directory, by an absolute path, by ".." or
by a link. Every reader of a stored description checks its names here.
"""

from __future__ import annotations

import os
from pathlib import Path


class UnsafeName(ValueError):
    """Raised when a stored name leads out of its directory."""


def resolve_stored_name(name: str, directory: str | Path | None = None) -> str:
    """Return `name` if it is a path inside its directory.

    With `directory`, a directory of this machine, links that lead out of it are refused, too. The
    file need not exist.

    Raises:
        UnsafeName: The name leads out of its directory.
    """
    parts = name.split("/")
    if "\0" in name or any(part in {"", ".", ".."} for part in parts):
        raise UnsafeName(f"the name {name!r} leads out of its directory")
    if directory is not None:
        # The directory itself may be behind a link, which its owner has made.
        real = os.path.realpath(directory)
        target = os.path.realpath(Path(real, name))
        if os.path.commonpath([real, target]) != real:
            raise UnsafeName(
                f"the name {name!r} leads out of its directory {real}: a link makes it {target}"
            )
    return name


def resolve_file_name(name: str, directory: str | Path | None = None) -> str:
    """Return `name` if it is a file directly in its directory.

    Raises:
        UnsafeName: The name leads out of its directory.
    """
    if "/" in name:
        raise UnsafeName(f"the name {name!r} leads out of its directory")
    return resolve_stored_name(name, directory)
