"""What the parts of a slot are given, for tests of one of them alone."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

from onceflow import RuntimeSettings
from onceflow.core.config import Delivery
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.runtime.slot.context import SlotContext, SlotMail, SlotPlan
from onceflow.core.runtime.transport.credentials import Credentials
from onceflow.core.storage import FileSystemStorage


def slot_plan(settings: RuntimeSettings | None = None) -> SlotPlan:
    settings = settings or RuntimeSettings()
    return SlotPlan("ledger", AttemptId(1), 1, 128, Delivery.EXACTLY_ONCE, settings)


def slot_context(directory: Path, told: queue.SimpleQueue[SlotMail]) -> SlotContext:
    """Return the context of a slot with checkpoints in `directory`, whose parts tell `told`."""
    return SlotContext(
        plan=slot_plan(),
        slot=0,
        log_id="log",
        credentials=Credentials("secret"),
        storage=FileSystemStorage(str(directory)).open("ledger"),
        scratch_dir=directory,
        post=told.put,
        beside=lambda work: work(),
        closing=threading.Event(),
    )
