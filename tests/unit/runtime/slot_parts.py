"""Doubles for the parts of a slot, for tests of one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from onceflow import RuntimeSettings
from onceflow.core.local_files import ScratchDirectory
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.runtime.slot.context import AttemptPlan, SlotContext, SlotMail
from onceflow.core.runtime.transport.credentials import Credentials
from onceflow.core.settings.pipeline_settings import Delivery
from onceflow.core.storage import FileSystemStorage


def attempt_plan(directory: Path, settings: RuntimeSettings | None = None) -> AttemptPlan:
    """Return the plan of the first attempt of a job with checkpoints in `directory`."""
    return AttemptPlan(
        job="ledger",
        attempt=AttemptId(1),
        parallelism=1,
        max_parallelism=128,
        delivery=Delivery.EXACTLY_ONCE,
        settings=settings or RuntimeSettings(),
        allow_non_restored_state=False,
        driver_address="nowhere",
        token="secret",
        tls=None,
        storage=FileSystemStorage(str(directory)),
        storage_token_path="",
        log_id="log",
        loopback=True,
    )


def slot_context(directory: Path, post: Callable[[SlotMail], None]) -> SlotContext:
    """Return the context of a slot with checkpoints in `directory`."""
    plan = attempt_plan(directory)
    return SlotContext(
        plan=plan,
        slot=0,
        credentials=Credentials(plan.token),
        storage=plan.storage.open(plan.job),
        scratch=ScratchDirectory.create(
            directory.with_name(f"{directory.name}-scratch"), "ledger-0"
        ),
        post=post,
        beside=lambda work: work(),
        closing=threading.Event(),
    )
