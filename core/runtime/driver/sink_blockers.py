"""Asks which blockers a sink's writers wait for when an ack is overdue. The answer is for people.

The attempt's thread decides when to ask a sink. The question may wait for a server, so it runs on a
separate daemon thread. A sink is asked again only after it has answered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from onceflow.core.protocol.ids import SubtaskRef
from onceflow.core.protocol.loops.attempt_facts import BlockersListed
from onceflow.core.runtime.driver.attempt_context import AttemptContext
from onceflow.core.runtime.events.job_events import SinkBlocked
from onceflow.core.runtime.json_logs import carry_fields
from onceflow.core.spi import CommitterContext, Sink

_INTERVAL_S = 1.0
"""The time between two questions to a sink: each opens a connection to its server."""

_log = logging.getLogger("onceflow.runtime.blockers")


@dataclass(slots=True)
class _Asked:
    """A sink that can name the blockers of its writers."""

    chain: str
    list_blockers: Callable[[], tuple[str, ...]]
    due_at: float = 0.0
    asking: bool = False
    overdue: bool = False
    blockers: tuple[str, ...] = ()
    """The blockers that were published last."""


class BlockerMonitor:
    """Asks sinks for blockers.

    Used by the attempt's thread alone; times are of `time.monotonic`.
    """

    def __init__(self, context: AttemptContext, tell: Callable[[BlockersListed], None]) -> None:
        self._attempt = context.plan.attempt
        self._publish = context.publish
        self._tell = tell
        chain_of = {
            operator.uid: chain.id
            for chain in context.graph.chains()
            for operator in chain.operators
        }
        self._sinks = {
            sink_context.uid: _Asked(
                chain_of[sink_context.uid], partial(_list_blockers, sink, sink_context)
            )
            for sink, sink_context in context.recovery.list_written_sinks()
            if type(sink).list_blockers is not Sink.list_blockers
        }

    def ask(self, overdue: frozenset[SubtaskRef], now: float) -> None:
        """Ask every sink that is due and has a subtask among `overdue`."""
        chains = {ref.chain for ref in overdue}
        for uid, asked in self._sinks.items():
            asked.overdue = asked.chain in chains
            if not asked.overdue:
                self._tell_people(uid, asked, ())
            elif not asked.asking and now >= asked.due_at:
                asked.asking, asked.due_at = True, now + _INTERVAL_S
                threading.Thread(
                    target=carry_fields(self._answer),
                    args=(uid, asked.list_blockers),
                    name=f"blockers of {uid}",
                    daemon=True,
                ).start()

    def take(self, answer: BlockersListed) -> None:
        """Publish changed blockers. The sink may be asked again."""
        asked = self._sinks[answer.uid]
        asked.asking = False
        if asked.overdue:
            self._tell_people(answer.uid, asked, answer.blockers)

    def _tell_people(self, uid: str, asked: _Asked, blockers: tuple[str, ...]) -> None:
        if blockers == asked.blockers:
            return
        asked.blockers = blockers
        self._publish(SinkBlocked(uid, blockers))
        if blockers:
            _log.warning(
                "sink %s is late with its answer to a checkpoint: it waits for %s",
                uid,
                "; ".join(blockers),
            )

    def _answer(self, uid: str, list_blockers: Callable[[], tuple[str, ...]]) -> None:
        self._tell(BlockersListed(self._attempt, uid, list_blockers()))


def _list_blockers(sink: Sink, context: CommitterContext) -> tuple[str, ...]:
    try:
        return tuple(sink.list_blockers(context))
    except Exception as error:
        _log.info("the sessions that block sink %s cannot be listed: %s", context.uid, error)
        return ()
