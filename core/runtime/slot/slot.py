"""A slot: a process that runs subtask i of every chain.

The threads of a slot:
    the task's own thread restores state and waits for the end
    `SlotControl` has one, and the stream to the driver has one that reads and one that writes
    each chain has one, and each sink has one for its committer
    two upload snapshots
    one checks that the peers of channels are alive, and one commits the positions of sources
    those of Flight serve the channels
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from onceflow.core.errors import SlotLost
from onceflow.core.local_files import ScratchDirectory
from onceflow.core.protocol.loops.slot import RestoreEnded
from onceflow.core.protocol.messages import Deploy, Hello
from onceflow.core.runtime.json_logs import bind_process_fields, configure_slot_logs
from onceflow.core.runtime.slot.chain_builder import ChainBuilder
from onceflow.core.runtime.slot.context import AttemptPlan, SlotContext, versions
from onceflow.core.runtime.slot.control import (
    ControlMail,
    Restored,
    RestoreFailed,
    SlotControl,
)
from onceflow.core.runtime.slot.program import unpickle_program
from onceflow.core.runtime.transport import addresses
from onceflow.core.runtime.transport.credentials import Credentials, identity_in
from onceflow.core.runtime.transport.data_plane import DataServer, SlotIdentity
from onceflow.core.settings.pipeline_settings import TlsFiles


def run_slot(plan: AttemptPlan, slot: int) -> str:
    """Run slot number `slot` to its end; return why it ended.

    Called in a process whose host has frozen its imported objects before it forked the process.
    """
    with _interrupts_ignored():
        return Slot(plan, slot).run()


def run_slot_on_spark(plan: AttemptPlan, slot: int) -> str:
    """Run a slot as `run_slot` does, in a Python worker of Spark: another task may follow.

    Freezes the imported objects meanwhile, unless the daemon of the workers has frozen them.
    """
    # Python counts frozen objects one by one: 10 ms that a slot of local processes is spared.
    if gc.get_freeze_count():
        return run_slot(plan, slot)
    gc.freeze()
    try:
        return run_slot(plan, slot)
    finally:
        gc.unfreeze()


class Slot:
    """A running slot: the process that Spark, or another cluster, provides to an attempt."""

    def __init__(self, plan: AttemptPlan, slot: int) -> None:
        configure_slot_logs(plan.logging)
        bind_process_fields(job=plan.job, attempt=plan.attempt, slot=slot)
        storage = plan.storage.open(plan.job)
        base = plan.settings.scratch_dir or tempfile.gettempdir()
        mailbox: queue.SimpleQueue[ControlMail] = queue.SimpleQueue()
        tls = identity_in(plan.tls) if isinstance(plan.tls, TlsFiles) else plan.tls
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="beside")
        self._context = context = SlotContext(
            plan=plan,
            slot=slot,
            credentials=Credentials(plan.token, tls),
            storage=storage,
            scratch=ScratchDirectory.create(Path(base), f"{plan.job}-{slot}"),
            post=mailbox.put,
            beside=self._beside.submit,
            closing=threading.Event(),
        )
        host = (
            "127.0.0.1"
            if plan.loopback
            else addresses.find_slot_host(plan.driver_address, plan.settings.slot_host)
        )
        self._data_server = DataServer(
            host,
            context.credentials,
            SlotIdentity(plan.job, plan.attempt, slot),
            lambda reason: context.fail(SlotLost(reason)),
            plan.settings.start_timeout_s,
        )
        hello = Hello(
            attempt=plan.attempt,
            slot=slot,
            pid=os.getpid(),
            parent_pid=os.getppid(),
            host=host,
            data_address=self._data_server.address,
            versions=versions(),
            storage_probe=storage.probe_read(plan.storage_token_path),
            machine=socket.gethostname(),
            network_id=addresses.read_network_id(),
            loopback=addresses.leads_to_loopback(host),
        )
        self._mailbox = mailbox
        self._control = SlotControl(context, mailbox, self._data_server, plan.driver_address, hello)

    def run(self) -> str:
        """Restore the deployed state, then wait for the end; return why the slot ended."""
        gc.set_threshold(50_000, 20, 50)  # batches make many short-lived objects and no cycles
        # A thread that returns from the network waits this long for a computing thread.
        sys.setswitchinterval(0.001)
        control = threading.Thread(target=self._control.run, name="control", daemon=True)
        control.start()
        if deploy := self._control.deploy.result():
            self._mailbox.put(self._restore(deploy))
        ended = self._control.ended.result()
        self._beside.shutdown(wait=False, cancel_futures=True)
        control.join()
        return ended

    def _restore(self, deploy: Deploy) -> Restored | RestoreFailed | RestoreEnded:
        """Build the chains of `deploy`. Runs on the main thread, which some user modules need."""
        try:
            program = unpickle_program(deploy.program)
            builder = ChainBuilder(self._context, program, deploy)
        except BaseException as error:
            return RestoreEnded(error)
        try:
            self._data_server.serve_gates(builder.gates)
            return Restored(builder.build())
        except BaseException as error:
            return RestoreFailed(error, builder.channels)


@contextmanager
def _interrupts_ignored() -> Generator[None]:
    """Ignore SIGINT meanwhile: ^C in a terminal reaches slots, but the driver handles it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
