"""Tests that a driver reads the first messages of all slots at once."""

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
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


_STATE_TYPES = """
import sys, threading
from dataclasses import make_dataclass
from onceflow.core.state.types.serializers import MsgpackSerializer

sys.setswitchinterval(1e-6)
begin, failed = threading.Barrier(8), []
kinds = []
for number in range(40):
    inner = make_dataclass(f"Inner{number}", [(f"f{field}", int) for field in range(20)])
    kinds.append(make_dataclass(f"Outer{number}", [("inner", inner), ("inners", list[inner])]))

def restore():
    begin.wait()
    for kind in kinds:
        inner = dict.fromkeys([f"f{field}" for field in range(20)], 1)
        serializer = MsgpackSerializer(kind)
        value = serializer.decode(serializer.encode({"inner": inner, "inners": [inner]}))
        if type(value) is not kind:
            failed.append(kind)

threads = [threading.Thread(target=restore) for _ in range(8)]
for one in threads: one.start()
for one in threads: one.join()
print(not failed)
"""


def test_state_types_that_operators_share_do_not_end_the_slot_that_restores_them() -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", _STATE_TYPES], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
