"""The steps of a world: the steps that a state allows, and the state after each.

A state is a tuple of numbers and short tuples. Processes, messages, the log and targets are in it
by their codes. A step of a process depends only on its code and on the event. So it is computed
once, by production's code, and looked up from then on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, TypeAlias

from tests.exploration import calls, driver, exchange, servers, slot
from tests.exploration.canonical import Codes, copy_of
from tests.exploration.describe import describe
from tests.exploration.driver import DriverProcess
from tests.exploration.ports import NoReply
from tests.exploration.procedures import Plan
from tests.exploration.servers import Log, Target, Violation
from tests.exploration.slot import SlotProcess
from tests.exploration.state import (
    DOWN,
    GONE,
    DriverState,
    Reply,
    SlotState,
    State,
    Step,
    View,
    with_driver,
    with_slot,
    without_gone,
)
from tests.exploration.worlds import World
from tests.simulation.variant import Variant

from onceflow.core.errors import InvariantViolation, OnceflowError, SinkError, StorageError
from onceflow.core.protocol import messages
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.log.rules import CheckpointDecided
from onceflow.core.protocol.loops import attempt_facts
from onceflow.core.protocol.loops.slot import DriverLost
from onceflow.core.storage.filesystems.filesystem import CreationUnknown

CLAIMS_MAX = 3
"""The claims without a decision in between from which on no claim is overtaken."""
BEGINS_MAX = 2
"""The starts from the savepoint, of which the second follows a death."""
Effects: TypeAlias = tuple[Any, ...]
BROKEN = (Violation, InvariantViolation, AssertionError, ValueError, OnceflowError)
"""The errors by which a step breaks a law, or production notices that it is broken."""

_CHANGES = (
    calls.Prepare,
    calls.CommitTransaction,
    calls.RollBack,
    calls.ApplyStaged,
    calls.CommitVersion,
)
_READS = (calls.OpenTarget, calls.ReadTarget, calls.ListInDoubt, calls.ReadThrough)


class Transitions:
    """All steps of one world under one variant."""

    def __init__(self, world: World, variant: Variant) -> None:
        self.world, self.variant = world, variant
        self.plan = Plan(
            world.slots,
            world.rows,
            world.sinks,
            world.checkpoints,
            world.sink_slots,
            world.overtakes,
            world.savepoint,
        )
        self.codes = Codes()
        self.tells = False
        """True if steps have texts."""
        self._moves: dict[tuple[int, int], tuple[int, Effects]] = {}
        self._views: dict[int, View] = {}
        self._events: dict[Any, int] = {}
        self._deliveries: dict[tuple[int, int], int] = {}
        self._asked: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._sinks = {sink.sink_id: number for number, sink in enumerate(world.sinks)}
        self._lost_driver = self.codes.code(DriverLost("its process has died"))

    def initial(self) -> State:
        rows = self.world.slots * self.world.rows
        targets = tuple(
            self.codes.code(Target(sink.sink_id, sink.kind, visible=(0,) * rows))
            for sink in self.world.sinks
        )
        drivers = (DriverState(),) * self.world.drivers
        return State(drivers, (), self.codes.code(Log()), targets, self.world.faults)

    def look(self, process: int) -> View:
        """Return what the process with this code may do."""
        view = self._views.get(process)
        if view is None:
            value = self.codes.value(process)
            requests = tuple((t, self.codes.code(r), r) for t, r in value.requests.items())
            view = View(value, tuple(map(self.codes.code, value.choices)), requests)
            self._views[process] = view
        return view

    def advance(self, process: int, event: int) -> tuple[int, Effects]:
        """Return the code of a process after `event`, and the effects on others."""
        key = process, event
        known = self._moves.get(key)
        if known is None:
            copy = copy_of(self.codes.value(process))
            effects = copy.step(self.codes.value(event))
            known = self._moves[key] = self.codes.code(copy), effects
        return known

    def check_codes(self, count: int) -> None:
        """Step processes that have one code and came about in other ways; compare what follows.

        Raises:
            AssertionError: A code leaves out something on which a step depends.
        """
        others = self.codes.others
        moves = [(process, event) for process, event in self._moves if process in others]
        for process, event in random.Random(len(moves)).sample(moves, min(count, len(moves))):
            copy = copy_of(others[process])
            try:
                effects = copy.step(self.codes.value(event))
            except BROKEN as error:
                raise AssertionError(f"one code, and only one raises: {error}") from error
            after, expected = self._moves[process, event]
            codes = self.codes.code(copy), self.codes.code(effects)
            assert codes == (after, self.codes.code(expected)), f"one code, two steps: {event}"

    def _event(self, kind: Callable[..., object], *arguments: int | str) -> int:
        """Return the code of the event `kind` of values that are given by their codes."""
        key = kind, *arguments
        known = self._events.get(key)
        if known is None:
            values = [a if isinstance(a, str) else self.codes.value(a) for a in arguments]
            known = self._events[key] = self.codes.code(kind(*values))
        return known

    def _describe(self, code: int) -> str:
        return describe(self.codes.value(code)) if self.tells else ""

    def all_steps(self, state: State) -> list[Step]:
        """Return each step that `state` allows."""
        found: list[Step] = []
        for number in range(len(state.drivers)):
            found += self._driver_steps(state, number)
        for index in range(len(state.slots)):
            found += self._slot_steps(state, index)
        log: Log = self.codes.value(state.log)
        if log.late is not None:
            found.append(Step("a late request reaches the log", lambda: self._arrive(state, log)))
        return found

    # --- slots -----------------------------------------------------------------------------------

    def _slot_steps(self, state: State, index: int) -> list[Step]:
        slot_state = state.slots[index]
        if slot_state.process == GONE:
            return []
        found = self._inner_steps(state, index)
        for thread, code, request in self.look(slot_state.process).requests:
            for reply in self._answers(state, code, request):
                found.append(self._answer_slot(state, index, thread, reply))
        return [*found, *self._deaths(state, index)]

    def _deaths(self, state: State, index: int) -> list[Step]:
        slot_state = state.slots[index]
        if not state.faults or self._lost_driver in slot_state.inbox:
            return []
        text = f"{slot_state.name} dies"
        return [Step(text, lambda: self._end_slot(state, index), is_fault=True)]

    def _inner_steps(self, state: State, index: int) -> list[Step]:
        """Return the steps of a slot in which no server acts."""
        slot_state = state.slots[index]
        if slot_state.process == GONE:
            return []
        found: list[Step] = []
        view = self.look(slot_state.process)
        if slot_state.inbox:
            found.append(self._receive(state, index))
        found += [self._choose(state, index, choice) for choice in view.choices]
        if view.value.is_working:
            for channel, elements in enumerate(slot_state.channels):
                if elements:
                    found.append(self._deliver(state, index, channel))
        return found

    def _choose(self, state: State, index: int, choice: int) -> Step:
        text = f"{state.slots[index].name} {self._describe(choice)}"
        return Step(text, lambda: self._move_slot(state, index, choice))

    def _receive(self, state: State, index: int) -> Step:
        slot_state = state.slots[index]
        text = f"{slot_state.name} receives {self._describe(slot_state.inbox[0])}"
        event = self._event(slot.Receive, slot_state.inbox[0])
        return Step(text, lambda: self._move_slot(state, index, event, takes=1))

    def _deliver(self, state: State, index: int, channel: int) -> Step:
        slot_state = state.slots[index]
        element = slot_state.channels[channel][0]
        event = self._deliveries.setdefault(
            (channel, element),
            self.codes.code(exchange.Deliver(channel, self.codes.value(element))),
        )
        channels = list(slot_state.channels)
        channels[channel] = channels[channel][1:]
        taken = with_slot(state, index, slot_state._replace(channels=tuple(channels)))
        text = f"the sink of {slot_state.name} gets {self._describe(element)}"
        text += f" of source {channel}"
        return Step(text, lambda: self._move_slot(taken, index, event))

    def _answer_slot(self, state: State, index: int, thread: str, reply: Reply) -> Step:
        slot_state = state.slots[index]

        def move() -> State:
            after, answer = reply.move()
            return self._move_slot(after, index, self._event(slot.Answer, thread, answer))

        text = f"{slot_state.name} {reply.text}"
        return Step(text, move, reply.is_fault)

    def _move_slot(self, state: State, index: int, event: int, takes: int = 0) -> State:
        slot_state = state.slots[index]
        process, effects = self.advance(slot_state.process, event)
        outbox, inbox = slot_state.outbox, slot_state.inbox[takes:]
        sent: list[exchange.SendElement] = []
        for effect in effects:
            if isinstance(effect, slot.Leave):
                process, inbox = GONE, ()
                outbox = (*outbox, self._code_of_loss(slot_state, effect.reason))
            elif isinstance(effect, exchange.SendElement):
                sent.append(effect)
            else:
                outbox = (*outbox, self._fact(slot_state, effect.message))
        outbox = outbox if slot_state.driver >= 0 else ()
        moved = slot_state._replace(process=process, inbox=inbox, outbox=outbox)
        if process == GONE:
            moved = moved._replace(channels=())
        slots = list(state.slots)
        slots[index] = moved
        for effect in sent:
            self._put(slots, slot_state, effect)
        return without_gone(state._replace(slots=tuple(slots)))

    def _put(self, slots: list[SlotState], sender: SlotState, sent: exchange.SendElement) -> None:
        """Add an element to the channel from `sender`; it is lost if the receiver is gone."""
        code = self.codes.code(sent.element)
        for index, slot_state in enumerate(slots):
            if (slot_state.attempt, slot_state.number) == (
                sender.attempt,
                sent.slot,
            ) and slot_state.process != GONE:
                channels = list(slot_state.channels)
                channels[sender.number] = (*channels[sender.number], code)
                slots[index] = slot_state._replace(channels=tuple(channels))

    def _fact(self, slot_state: SlotState, message: messages.SlotMessage) -> int:
        attempt = AttemptId(slot_state.attempt)
        return self.codes.code(
            attempt_facts.SlotMessageReceived(attempt, slot_state.number, message)
        )

    def _code_of_loss(self, slot_state: SlotState, reason: str) -> int:
        return self.codes.code(
            attempt_facts.SlotGone(slot_state.number, AttemptId(slot_state.attempt), reason)
        )

    def _end_slot(self, state: State, index: int) -> State:
        slot_state = state.slots[index]
        outbox = (
            (*slot_state.outbox, self._code_of_loss(slot_state, "killed"))
            if slot_state.driver >= 0
            else ()
        )
        ended = slot_state._replace(process=GONE, inbox=(), outbox=outbox, channels=())
        return with_slot(state, index, ended)._replace(faults=state.faults - 1)

    # --- drivers ---------------------------------------------------------------------------------

    def _driver_steps(self, state: State, number: int) -> list[Step]:
        driver_state, name = state.drivers[number], f"driver {number}"
        found = self._starts_from_savepoint(state, number)
        if driver_state.process == DOWN:
            if not state.is_finished:
                found.append(Step(f"{name} starts", lambda: self._start_driver(state, number)))
            return found
        view = self.look(driver_state.process)
        if view.value.phase in {"over", "finished"}:
            return found
        asked = state._replace(asked_in=view.value.attempt)
        if self.world.savepoint and not state.asked_in and view.value.may_be_asked:
            event = self._event(driver.RequestSavepoint)
            text = f"{name} is asked for a savepoint"
            found.append(Step(text, lambda: self._move_driver(asked, number, event), True))
        for choice in view.choices:
            before = state
            if self.world.asks_once and self.codes.value(choice) == driver.RequestCheckpoint():
                if state.asked_in:
                    continue
                before = asked
            text = f"{name} {self._describe(choice)}"
            found.append(
                Step(text, lambda s=before, c=choice: self._move_driver(s, number, c))  # type: ignore[misc]
            )
        for index, peer in enumerate(state.slots):
            if peer.driver == number and peer.outbox:
                found.append(self._hear(state, index))
        for thread, code, request in view.requests:
            for reply in self._answers(state, code, request):
                found.append(self._answer_driver(state, number, thread, reply))
        if state.faults:
            spent = state._replace(faults=state.faults - 1)
            if view.value.may_time_out:
                event = self._event(driver.TimeOut)
                text = f"{name} has waited too long for an ack"
                found.append(Step(text, lambda: self._move_driver(spent, number, event), True))
            found.append(Step(f"{name} dies", lambda: self._end_driver(spent, number), True))
        return found

    def _answer_driver(self, state: State, number: int, thread: str, reply: Reply) -> Step:
        def move() -> State:
            after, answer = reply.move()
            return self._move_driver(after, number, self._event(slot.Answer, thread, answer))

        return Step(f"driver {number} {reply.text}", move, reply.is_fault)

    def _starts_from_savepoint(self, state: State, number: int) -> list[Step]:
        """Return the start from the savepoint.

        A user may stop a job that runs, and start it from the savepoint, once. After a death, the
        same start may happen again.
        """
        log: Log = self.codes.value(state.log)
        is_down = state.drivers[number].process == DOWN
        if log.savepoint is None or state.begins >= (BEGINS_MAX if is_down else 1):
            return []
        stopped = state if is_down else self._end_driver(state, number)
        begun = stopped._replace(begins=state.begins + 1, is_finished=False)
        text = f"driver {number} starts from the savepoint"
        # A user may start the job again, and nothing has to follow.
        return [Step(text, lambda: self._start_driver(begun, number, from_savepoint=True), True)]

    def _start_driver(self, state: State, number: int, *, from_savepoint: bool = False) -> State:
        starts = state.drivers[number].starts
        owner = f"d{number}.{starts}"
        process = self.codes.code(
            DriverProcess(self.plan, owner, self.variant, from_savepoint=from_savepoint)
        )
        state = with_driver(state, number, DriverState(process, starts + 1))
        return self._move_driver(state, number, self._event(driver.Start))

    def _hear(self, state: State, index: int) -> Step:
        slot_state = state.slots[index]
        number, code = slot_state.driver, slot_state.outbox[0]
        fact = self.codes.value(code)
        told = isinstance(fact, attempt_facts.SlotMessageReceived)
        if told and not self.variant.slot_checks_attempt:
            attempt = self.look(state.drivers[number].process).value.attempt
            fact = attempt_facts.SlotMessageReceived(attempt, fact.slot, fact.message)
            code = self.codes.code(fact)
        event = self._event(driver.Hear, code)
        heard = with_slot(state, index, slot_state._replace(outbox=slot_state.outbox[1:]))
        who = slot_state.name
        text = f"driver {number} hears of {who}: {self._describe(code)}"
        return Step(text, lambda: self._move_driver(heard, number, event))

    def _move_driver(self, state: State, number: int, event: int) -> State:
        driver_state = state.drivers[number]
        process, effects = self.advance(driver_state.process, event)
        while (read := self._find_read(state, process, event)) is not None:
            event = self._event(slot.Answer, *self._read(state, *read))
            process, more = self.advance(process, event)
            effects = (*effects, *more)
        state = with_driver(state, number, driver_state._replace(process=process))
        for effect in effects:
            state = self._apply(state, number, effect)
        return state

    def _find_read(
        self, state: State, process: int, event: int
    ) -> tuple[str, calls.LogRequest] | None:
        """Return a request to the log that is answered in the step that makes it.

        A record never changes, so it is read at once. A driver that starts has not been noticed
        yet: if the log changes before its first list, it might as well have started later. The log
        is listed twice to read it, and a reader whose second list differs begins anew. So it might
        as well have begun later, too.

        Two drivers may overtake each other's claims for ever, or until both give up after many
        tries. This is bounded: after `CLAIMS_MAX` claims in a row, a claim and the list after it
        are one step.
        """
        after = self.codes.value(event)
        starts = isinstance(after, driver.Start)
        listed = isinstance(after, slot.Answer) and isinstance(after.answer, tuple)
        for thread, _, request in self.look(process).requests:
            if isinstance(request, calls.ReadRecord):
                return thread, request
            # Without the rule, the first list of `put` could not be told from that of `read`.
            claimed = thread == "claim" and self._claims_in_a_row(state.log) >= CLAIMS_MAX
            if claimed and isinstance(request, calls.ListRecords):
                return thread, request
            again = starts or (listed and after.thread == thread and thread == "claim")
            if self.world.reduces and again and isinstance(request, calls.ListRecords):
                return thread, request
        return None

    def _claims_in_a_row(self, log: int) -> int:
        records: Log = self.codes.value(log)
        claims = takewhile(
            lambda data: not isinstance(servers.decode(data), CheckpointDecided),
            reversed(records.records),
        )
        return sum(1 for _ in claims)

    def _read(self, state: State, thread: str, request: calls.LogRequest) -> tuple[str, int]:
        log: Log = self.codes.value(state.log)
        answer: object = tuple(enumerate(log.records, start=1))
        if isinstance(request, calls.ReadRecord):
            exists = request.sequence <= len(log.records)
            answer = log.records[request.sequence - 1] if exists else None
        return thread, self.codes.code(answer)

    def _apply(self, state: State, number: int, effect: driver.DriverEffect) -> State:
        match effect:
            case driver.SendAll(message):
                return self._send(state, number, message)
            case driver.Deployed(attempt, _, message):
                log: Log = self.codes.value(state.log)
                if log.newest_attempt == attempt:
                    servers.check_restored(log, self._targets(state))
                begun = tuple(
                    SlotState(
                        attempt,
                        index,
                        number,
                        self.codes.code(self._slot(attempt, index)),
                        channels=((),) * (self.world.slots if index < self.plan.sink_slots else 0),
                    )
                    for index in range(self.world.slots)
                )
                return self._send(state._replace(slots=(*state.slots, *begun)), number, message)
            case driver.AttemptOver():
                return self._send(state, number, messages.Shutdown("the attempt is over"))
            case driver.Finished(attempt, is_stopped):
                log = self.codes.value(state.log)
                if log.newest_attempt == attempt:
                    servers.check_finished(log, self._targets(state), is_stopped=is_stopped)
                return state._replace(is_finished=True)
            case driver.SavepointAnswered(is_written):
                servers.check_answer(self.codes.value(state.log), is_written=is_written)
                return state
            case driver.Refused(reason):
                servers.check_refused(self.codes.value(state.log), reason)
                return with_driver(state, number, DriverState(DOWN, state.drivers[number].starts))
            case driver.GaveUp(attempt, reason):
                if self.codes.value(state.log).newest_attempt == attempt:
                    raise Violation(f"the job fails for good: {reason}")
                return state
            case driver.Fenced() | driver.Note():
                return state

    def _slot(self, attempt: AttemptId, index: int) -> SlotProcess:
        if self.world.has_exchange:
            return exchange.ExchangeSlot(attempt, index, self.variant, self.plan)
        return SlotProcess(attempt, index, self.world.rows, self.world.sinks, self.variant)

    def _targets(self, state: State) -> tuple[Target, ...]:
        return tuple(map(self.codes.value, state.targets))

    def _send(self, state: State, number: int, message: object) -> State:
        """Add a message to the inbox of each live slot of the driver's attempt."""
        code = self.codes.code(message)
        attempt = self.look(state.drivers[number].process).value.sends_to
        slots = tuple(
            s._replace(inbox=(*s.inbox, code))
            if s.driver == number and s.attempt == attempt and s.process != GONE
            else s
            for s in state.slots
        )
        return state._replace(slots=slots)

    def _end_driver(self, state: State, number: int) -> State:
        """Kill a driver: each of its slots finds that its stream has ended, some time later."""
        slots = tuple(
            s._replace(inbox=(*s.inbox, self._lost_driver), outbox=(), driver=-1)
            if s.driver == number
            else s
            for s in state.slots
        )
        starts = state.drivers[number].starts
        state = with_driver(state, number, DriverState(DOWN, starts))
        return state._replace(slots=tuple(s for s in slots if s.process != GONE))

    # --- servers ---------------------------------------------------------------------------------

    def _answers(self, state: State, code: int, request: calls.Request) -> Iterator[Reply]:
        """Yield each way in which a server may answer `request`."""
        what = self._describe(code)
        if isinstance(request, (calls.ListRecords, calls.CreateRecord, calls.ReadRecord)):
            yield from self._log_answers(state, request, what)
            return
        if isinstance(request, calls.SavepointCall):
            yield from self._savepoint_answers(state, request, what)
            return
        yield Reply(what, lambda: self._ask(state, code, request))
        if not state.faults:
            return
        spent = state._replace(faults=state.faults - 1)
        if isinstance(request, _CHANGES):
            lost = self.codes.code(calls.Failed(NoReply("the reply is lost")))
            text = f"{what}, and the reply is lost"
            yield Reply(text, lambda: (self._ask(spent, code, request)[0], lost), True)
            yield Reply(f"{what}, and it never arrives", lambda: (spent, lost), True)
        elif isinstance(request, _READS):
            failed = self.codes.code(calls.Failed(SinkError("the target does not answer")))
            yield Reply(f"{what}, and gets no answer", lambda: (spent, failed), True)

    def _ask(self, state: State, code: int, request: calls.TargetRequest) -> tuple[State, int]:
        number = self._sinks[request.sink]
        key = state.targets[number], code, state.log
        known = self._asked.get(key)
        if known is None:
            log: Log = self.codes.value(state.log)
            target, answer = servers.ask(self.codes.value(key[0]), request, log)
            known = self._asked[key] = self.codes.code(target), self.codes.code(answer)
        targets = (*state.targets[:number], known[0], *state.targets[number + 1 :])
        return state._replace(targets=targets), known[1]

    def _log_answers(self, state: State, request: calls.LogRequest, what: str) -> Iterator[Reply]:
        log: Log = self.codes.value(state.log)
        spent = state._replace(faults=max(0, state.faults - 1))
        match request:
            case calls.ListRecords():
                records = tuple(enumerate(log.records, start=1))
                yield Reply(what, lambda: (state, self.codes.code(records)))
            case calls.ReadRecord():
                raise AssertionError("records are read in the step that asks for them")
            case calls.CreateRecord(sequence, data):
                yield Reply(what, lambda: self._create(state, sequence, data))
                if not state.faults:
                    return
                error = StorageError if self.variant.lost_reply_is_refusal else CreationUnknown
                unknown = self.codes.code(calls.Failed(error("the reply is lost")))
                yield Reply(
                    f"{what}, and the reply is lost",
                    lambda: (self._create(spent, sequence, data)[0], unknown),
                    is_fault=True,
                )
                if log.late is None:
                    late = self.codes.code(replace(log, late=(sequence, data)))
                    after = spent._replace(log=late)
                    yield Reply(f"{what}: it is on its way", lambda: (after, unknown), True)
        if state.faults:
            failed = self.codes.code(calls.Failed(StorageError("the log refuses")))
            yield Reply(f"{what}, and the log refuses", lambda: (spent, failed), is_fault=True)

    def _savepoint_answers(
        self, state: State, request: calls.SavepointCall, what: str
    ) -> Iterator[Reply]:
        spent = state._replace(faults=max(0, state.faults - 1))
        failed = self.codes.code(calls.Failed(StorageError("the storage refuses")))
        yield Reply(what, lambda: self._keep(state, request))
        if not state.faults:
            return
        yield Reply(f"{what}, and the storage refuses", lambda: (spent, failed), True)
        if isinstance(request, (calls.WriteMetadata, calls.DeleteMetadata)):
            text = f"{what}, and the reply is lost"
            yield Reply(text, lambda: (self._keep(spent, request)[0], failed), True)

    def _keep(self, state: State, request: calls.SavepointCall) -> tuple[State, int]:
        log: Log = self.codes.value(state.log)
        answer = None
        match request:
            case calls.WriteMetadata(savepoint):
                log = servers.keep(log, self._targets(state), savepoint)
            case calls.DeleteMetadata():
                log = replace(log, savepoint=None)
            case calls.ReadMetadata():
                answer = log.savepoint
            case calls.CopyState():
                pass
        return state._replace(log=self.codes.code(log)), self.codes.code(answer)

    def _create(self, state: State, sequence: int, data: bytes) -> tuple[State, int]:
        log, targets, existing = servers.create(
            self.codes.value(state.log),
            self._targets(state),
            sequence,
            data,
            overwrites=self.variant.overwrites,
        )
        return self._with_servers(state, log, targets), self.codes.code(existing)

    def _arrive(self, state: State, log: Log) -> State:
        assert log.late is not None
        after, targets, _ = servers.create(
            replace(log, late=None),
            self._targets(state),
            *log.late,
            overwrites=self.variant.overwrites,
        )
        return self._with_servers(state, after, targets)

    def _with_servers(self, state: State, log: Log, targets: Sequence[Target]) -> State:
        code = self.codes.code
        return state._replace(log=code(log), targets=tuple(map(code, targets)))
