"""^C in a terminal reaches slots, too, but is the driver's to decide."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def interrupts_ignored() -> Generator[None]:
    """Ignore SIGINT meanwhile. Runs in slots."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
