"""The control stream when the process at its other end stands still: nobody waits for it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.protocol.loops.attempt_driving import SETTINGS
from tests.unit.storage.storage_samples import start_python

from onceflow.core.errors import SlotLost
from onceflow.core.protocol.checkpoints.decisions import NotifyAbort
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.loops.slot import DriverLost
from onceflow.core.protocol.loops.slots import SlotRoster
from onceflow.core.protocol.messages import Declined, DriverMessage, Heartbeat, Hello, PartFailed
from onceflow.core.runtime.driver.attempt_context import SlotPool
from onceflow.core.runtime.slot.context import versions
from onceflow.core.runtime.transport import control_plane
from onceflow.core.runtime.transport.credentials import Credentials

ATTEMPT = AttemptId(1)
MEGABYTE = "x" * (1 << 20)

SLOT = """
import json, os, queue, sys
from onceflow.core.runtime.transport.control_plane import ControlStream
from onceflow.core.protocol.loops.slot import DriverLost
from onceflow.core.runtime.transport.credentials import Credentials
from onceflow.core.protocol.messages import Hello
hello = Hello(1, 0, os.getpid(), os.getppid(), "here", "", json.loads(sys.argv[2]))
heard = queue.SimpleQueue()
stream = ControlStream(sys.argv[1], Credentials("secret"), hello, heard.put)
while not isinstance(message := heard.get(), DriverLost):
    print(type(message).__name__, flush=True)
"""
DRIVER = """
import sys
from onceflow.core.runtime.transport.control_plane import ControlServer
from onceflow.core.runtime.transport.credentials import Credentials
server = ControlServer("127.0.0.1", Credentials("secret"), lambda event: None)
print(server.address, flush=True)
sys.stdin.read()
"""
LEAVING_DRIVER = """
import sys
from onceflow.core.runtime.transport.control_plane import ControlServer
from onceflow.core.runtime.transport.credentials import Credentials
def post(event):
    print(type(event).__name__, flush=True)
server = ControlServer("127.0.0.1", Credentials("secret"), post)
print(server.address, flush=True)
sys.stdin.readline()
print("ended" if server.close(0.1) else "not ended", flush=True)
"""


@contextlib.contextmanager
def running(script: str, *arguments: str) -> Generator[subprocess.Popen[str], None, None]:
    process = start_python(script, *arguments)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_frozen_slot_holds_nobody_up_and_is_lost_by_name_when_it_takes_nothing(
    tmp_path: Path,
) -> None:
    events: queue.SimpleQueue[control_plane.ControlEvent] = queue.SimpleQueue()
    server = control_plane.ControlServer("127.0.0.1", Credentials("secret"), events.put)
    roster, pool = SlotRoster(replace(SETTINGS, heartbeat_timeout_s=1.0)), SlotPool()
    with running(SLOT, server.address, json.dumps(versions())) as slot:
        connected = events.get(timeout=60)
        assert isinstance(connected, control_plane.SlotConnected)
        roster.admit(connected.link.hello, time.monotonic())
        pool.admit(connected.link)
        os.kill(slot.pid, signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(32):
            pool.send_all(NotifyAbort(CheckpointId(1), MEGABYTE))
        assert time.monotonic() - began < 60.0
        lost: SlotLost | None = None
        while lost is None and (now := time.monotonic()) < began + 60:
            roster.hear(0, now)  # as if it still spoke
            lost = roster.find_lost(pool.waiting_s(now), now)
            time.sleep(0.05)
        assert f"slot 0 (process {slot.pid} on " in str(lost)
        assert "has taken no message" in str(lost)
    server.close(5.0)


def test_what_waits_for_a_frozen_slot_arrives_when_it_goes_on() -> None:
    events: queue.SimpleQueue[control_plane.ControlEvent] = queue.SimpleQueue()
    server = control_plane.ControlServer("127.0.0.1", Credentials("secret"), events.put)
    with running(SLOT, server.address, json.dumps(versions())) as slot:
        connected = events.get(timeout=60)
        assert isinstance(connected, control_plane.SlotConnected)
        os.kill(slot.pid, signal.SIGSTOP)
        for _ in range(32):
            connected.link.send(NotifyAbort(CheckpointId(1), MEGABYTE))
        connected.link.send(Heartbeat())
        os.kill(slot.pid, signal.SIGCONT)
        assert slot.stdout is not None
        heard = [slot.stdout.readline().strip() for _ in range(33)]
        assert heard == ["NotifyAbort"] * 32 + ["Heartbeat"]
        # The slot may speak before the driver's thread has noted that its message was taken.
        until = time.monotonic() + 90
        while connected.link.waiting_s(time.monotonic()) and time.monotonic() < until:
            time.sleep(0.01)
        assert connected.link.waiting_s(time.monotonic()) == 0.0
    server.close(5.0)


def test_a_frozen_driver_holds_no_thread_of_a_slot_up() -> None:
    with running(DRIVER) as driver:
        assert driver.stdout is not None
        address = driver.stdout.readline().strip()
        hello = Hello(ATTEMPT, 0, os.getpid(), os.getppid(), "here", "", versions())
        heard: queue.SimpleQueue[DriverMessage | DriverLost | PartFailed] = queue.SimpleQueue()
        stream = control_plane.ControlStream(address, Credentials("secret"), hello, heard.put)
        os.kill(driver.pid, signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(32):
            stream.send(Declined(CheckpointId(1), SubtaskRef("balance", 0), MEGABYTE))
        assert time.monotonic() - began < 60.0
        stream.close(0.5)
        assert time.monotonic() - began < 60.0
        assert isinstance(heard.get(timeout=60), DriverLost)


def test_a_driver_that_exits_beside_a_frozen_slot_outlives_the_stream() -> None:
    """A stream that ends while the interpreter does aborts the process."""
    with running(LEAVING_DRIVER) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        address = driver.stdout.readline().strip()
        with running(SLOT, address, json.dumps(versions())) as slot:
            assert driver.stdout.readline().strip() == "SlotConnected"
            os.kill(slot.pid, signal.SIGSTOP)
            driver.stdin.write("\n")
            driver.stdin.flush()
            assert driver.stdout.readline().strip() == "not ended"
            with pytest.raises(subprocess.TimeoutExpired):
                driver.wait(1.0)
            slot.kill()
        assert driver.stdout.readline().strip() == "SlotGone"
        assert driver.wait(60) == 0
