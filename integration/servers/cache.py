"""Where downloads are kept, and how they appear there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def cache_directory() -> Path:
    """Return ONCEFLOW_CACHE, else $XDG_CACHE_HOME/onceflow, else ~/.cache/onceflow; made if new."""
    chosen = os.environ.get("ONCEFLOW_CACHE")
    if chosen:
        directory = Path(chosen).expanduser()
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        directory = (Path(base) if base else Path.home() / ".cache") / "onceflow"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextmanager
def publish(target: Path) -> Generator[Path, None, None]:
    """Yield an empty directory beside `target` that becomes `target` when the block ends well.

    `target` is therefore never seen half filled, whatever is killed. Of two processes that publish
    the same target, the first wins and the other's copy is dropped. An error in the block leaves
    nothing.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield fresh
        try:
            fresh.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
