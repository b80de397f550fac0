"""What a driver hears first, it hears from all slots at once."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys, threading
from typing import get_args
import msgspec
from onceflow.core.errors import MessageCorrupt
from onceflow.core.runtime import messages

sys.setswitchinterval(1e-6)
kinds = (*get_args(messages.SlotMessage), *get_args(messages.DriverMessage))
names = [one.__name__ for one in kinds]
begin, refused = threading.Barrier(8), []

def hear():
    begin.wait()
    for name in names:
        try:
            messages.decode_message(msgspec.msgpack.encode([name, {}]))
        except MessageCorrupt:
            refused.append(name)

threads = [threading.Thread(target=hear) for _ in range(8)]
for one in threads: one.start()
for one in threads: one.join()
print(len(refused) > 8)
"""


def test_first_messages_of_many_threads_at_once_do_not_end_the_process() -> None:
    """msgspec's look-up of a class is not made for it: two processes of three ended by SIGSEGV."""
    for _ in range(6):
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
