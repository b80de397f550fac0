"""Names of files that stand in storage: manifests, state handles and descriptions of data files.

Whoever can write to checkpoint storage may decide what a job commits, and nothing more. So a name
from there leads to no file outside of the directory that it belongs to: by no absolute path, by no
"..", and by no link. Every reader of a stored description passes its names through here.
"""

from __future__ import annotations

import os
from pathlib import Path


class UnsafeName(ValueError):
    """Raised when a stored name leads out of its directory."""


def resolve_stored_name(name: str, directory: str | Path | None = None) -> str:
    """Return `name`, a path relative to the directory that it belongs to.

    With `directory`, a directory of this machine, no link may lead out of it either, whether or not
    the file is there.

    Raises:
        UnsafeName: It leads elsewhere.
    """
    parts = name.split("/")
    if "\0" in name or any(part in {"", ".", ".."} for part in parts):
        raise UnsafeName(f"the name {name!r} leads out of its directory")
    if directory is not None:
        # The directory may itself be reached by a link: its owner has put it there.
        real = os.path.realpath(directory)
        target = os.path.realpath(Path(real, name))
        if os.path.commonpath([real, target]) != real:
            raise UnsafeName(
                f"the name {name!r} leads out of its directory {real}: a link makes it {target}"
            )
    return name


def resolve_file_name(name: str, directory: str | Path | None = None) -> str:
    """Return `name`, a file right in the directory that it belongs to.

    Raises:
        UnsafeName: It leads elsewhere.
    """
    if "/" in name:
        raise UnsafeName(f"the name {name!r} leads out of its directory")
    return resolve_stored_name(name, directory)
