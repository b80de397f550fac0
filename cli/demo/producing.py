"""The stream of payments, produced while the job runs and held where the kills want it."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from typing_extensions import Self

from onceflow.cli.demo.driver_files import JobSpec
from onceflow.cli.demo.killing import Killer
from onceflow.cli.demo.narrator import Narrator
from onceflow.integration.workload import Payments, produce

_LOOK_INTERVAL_S = 0.01


class _Abandoned(Exception):
    """Ends the production when the demo ends before it."""


class Producing:
    """Produces on a thread of its own, never further than the killer has released."""

    def __init__(
        self, payments: Payments, spec: JobSpec, killer: Killer, narrator: Narrator
    ) -> None:
        """Describe it; entering the context begins."""
        self._payments = payments
        self._spec = spec
        self._killer = killer
        self._advance = narrator.bar("payments into Kafka", payments.records)
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="demo producer")
        self._result: Future[None] | None = None

    def wait(self) -> None:
        """Return when every payment is in the topic.

        Raises:
            ProduceError: The broker did not take one.
        """
        if self._result is not None:
            self._result.result()

    def check(self) -> None:
        """Return at once; raise what went wrong if something did.

        Raises:
            ProduceError: The broker did not take a payment.
        """
        if self._result is not None and self._result.done():
            self._result.result()

    def __enter__(self) -> Self:
        """Begin."""
        self._result = self._pool.submit(
            produce,
            self._payments,
            self._spec.bootstrap_servers,
            self._spec.topic,
            progress=self._hold,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End, done or not."""
        self._ended.set()
        self._pool.shutdown(wait=True)

    def _hold(self, sent: int) -> None:
        self._advance(sent)
        while self._killer.released_records <= sent < self._payments.records:
            if self._ended.wait(_LOOK_INTERVAL_S):
                raise _Abandoned
        if self._ended.is_set():
            raise _Abandoned
