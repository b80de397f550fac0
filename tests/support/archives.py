"""The unpacking of tar archives with every Python that onceflow supports."""

from __future__ import annotations

import tarfile
from pathlib import Path


def unpack_tar(archive: Path, directory: Path) -> None:
    """Unpack `archive` into `directory`, with the filter for data if this Python has it.

    Python has it since 3.10.12 and 3.11.4, which are newer than Debian's.
    """
    with tarfile.open(archive) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(directory)
