"""An output that goes on once its reader has ended.

A pipe loses its reader when `head` or the system's journal ends, and a terminal may be closed.
Python raises an error at each later write. Only the output should be lost then, not the work.
"""

from __future__ import annotations

import errno
import io
import time

from typing_extensions import Buffer, override

_IS_GONE = frozenset({errno.EPIPE, errno.EIO})
_FULL_S = 0.005
"""The pause in seconds if a non-blocking descriptor has no room."""


class UnreadOutput(io.FileIO):
    """A file that drops data once its reader is gone."""

    is_unread = False
    """True once data was dropped."""

    @override
    def write(self, data: Buffer, /) -> int:
        """Write `data`, or drop the data if the reader is gone. Return the number of bytes taken.

        Waits a moment and returns 0 if a non-blocking descriptor has no room.
        """
        try:
            # None if a non-blocking descriptor has no room.
            written: int | None = super().write(data)
        except OSError as error:
            if error.errno not in _IS_GONE:
                raise
            self.is_unread = True
            return memoryview(data).nbytes
        if written is None:
            # io.BufferedWriter calls again at once, and would use a whole processor.
            time.sleep(_FULL_S)
            return 0
        return written
